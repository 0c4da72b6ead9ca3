"""Product-key Top-k in plain PyTorch: two stages, and the whole Cartesian grid.

Paper, Section 4.2, "Multi-head product-key memory", and Appendix "Fused Cartesian Top-k".
`README.md` beside this file says why the two stages find the exact Top-k over all n * n pairs.

Shape letters: H heads, E query width, n sub-keys, K top_k.
"""

import torch
from torch import Tensor

_FEW = 8


def product_key_topk(
    queries: Tensor, row_keys: Tensor, col_keys: Tensor, top_k: int, cartesian: bool = False
) -> tuple[Tensor, Tensor]:
    """Finds the ``top_k`` best slots of every head; arguments and result as `ops` has them."""
    row_scores, col_scores = _subkey_scores(queries, row_keys, col_keys)  # [..., H, n] each
    num_subkeys = row_keys.shape[1]
    if cartesian:
        pair_scores = row_scores.unsqueeze(-1) + col_scores.unsqueeze(-2)  # [..., H, n, n]
        return _best(pair_scores.flatten(-2), top_k)
    # In rising order, so that candidates, row by row, are in the order of their slot numbers.
    row_idx = _best(row_scores, top_k)[0].sort(dim=-1).values  # [..., H, K]
    col_idx = _best(col_scores, top_k)[0].sort(dim=-1).values
    row_best, col_best = row_scores.gather(-1, row_idx), col_scores.gather(-1, col_idx)
    pair_scores = row_best.unsqueeze(-1) + col_best.unsqueeze(-2)  # [..., H, K, K]
    candidates = row_idx.unsqueeze(-1) * num_subkeys + col_idx.unsqueeze(-2)
    winners, scores = _best(pair_scores.flatten(-2), top_k)  # [..., H, K] each
    return candidates.flatten(-2).gather(-1, winners), scores


def _subkey_scores(queries: Tensor, row_keys: Tensor, col_keys: Tensor) -> tuple[Tensor, Tensor]:
    """In float32 or wider, whatever the inputs' types and whatever autocast says."""
    dtype = torch.float32
    for tensor in (queries, row_keys, col_keys):
        dtype = torch.promote_types(dtype, tensor.dtype)
    with torch.autocast(queries.device.type, enabled=False):
        row_queries, col_queries = queries.to(dtype).chunk(2, dim=-1)
        row_scores = torch.einsum("...he,hne->...hn", row_queries, row_keys.to(dtype))
        col_scores = torch.einsum("...he,hne->...hn", col_queries, col_keys.to(dtype))
    return row_scores, col_scores


def _best(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Indices and values of the largest, best first; of equal ones the lowest index.

    ``topk`` does not say which of several equal scores it takes. ``argmax`` takes the first and a
    stable sort keeps it; for few scores out of many the former is quicker.
    """
    if top_k > _FEW:
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return indices[..., :top_k], values[..., :top_k]
    left, chosen = scores.detach(), []
    for _ in range(top_k):
        chosen.append(left.argmax(dim=-1, keepdim=True))
        left = left.scatter(-1, chosen[-1], float("-inf"))
    indices = torch.cat(chosen, dim=-1)
    return indices, scores.gather(-1, indices)

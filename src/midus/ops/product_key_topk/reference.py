"""Two-stage product-key Top-k in plain PyTorch.

Paper, Section 4.2, "Multi-head product-key memory". `README.md` beside this file says why the
two stages find the exact Top-k over all n * n pairs.

Shape letters: H heads, E query width, n sub-keys, K top_k.
"""

import torch
from torch import Tensor


def product_key_topk(
    queries: Tensor, row_keys: Tensor, col_keys: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Finds the ``top_k`` best slots of every head's product keys.

    Scores are accumulated and compared in float32 or wider whatever the inputs' type and
    whatever autocast says, so that bfloat16 inputs pick the slots float32 arithmetic picks.

    Args:
        queries: ``[..., H, E]``; the first half of E meets the row keys, the second the columns.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        top_k: Slots to keep per head and query, at most n.

    Returns:
        Flat slot numbers ``row * n + col`` and their scores, both ``[..., H, K]``, best first.
    """
    num_subkeys = row_keys.shape[1]
    dtype = torch.promote_types(queries.dtype, torch.float32)
    with torch.autocast(queries.device.type, enabled=False):
        row_queries, col_queries = queries.to(dtype).chunk(2, dim=-1)
        row_scores = torch.einsum("...he,hne->...hn", row_queries, row_keys.to(dtype))
        col_scores = torch.einsum("...he,hne->...hn", col_queries, col_keys.to(dtype))
    row_best, row_idx = row_scores.topk(top_k, dim=-1)  # [..., H, K]
    col_best, col_idx = col_scores.topk(top_k, dim=-1)  # [..., H, K]
    pair_scores = row_best.unsqueeze(-1) + col_best.unsqueeze(-2)  # [..., H, K, K]
    candidates = row_idx.unsqueeze(-1) * num_subkeys + col_idx.unsqueeze(-2)  # [..., H, K, K]
    scores, winners = pair_scores.flatten(-2).topk(top_k, dim=-1)  # [..., H, K]
    return candidates.flatten(-2).gather(-1, winners), scores

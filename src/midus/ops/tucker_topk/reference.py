"""UltraMem's Tucker-decomposed retrieval with rank-1 routing, in plain PyTorch.

Huang et al. (2024), "Ultra-Sparse Memory Network"; a memory layer of the paper's comparison. Shape
letters: H heads, E half the query width, n sub-keys a side, r rank, C cores, K top_k.
"""

import torch
from torch import Tensor


def tucker_topk(
    row_queries: Tensor,
    col_queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    cores: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Finds slots of the grid whose score is ``sum_c row(i)^T core_c col(j)``.

    Rows and columns are chosen by the leading singular vectors of the summed cores (rank-1
    routing), and the K * K candidates by their exact scores; `README.md` beside this file says what
    that may miss.

    Args:
        row_queries: ``[..., H, E]``.
        col_queries: ``[..., H, E]``.
        row_keys: ``[H, n, E, r]``.
        col_keys: ``[H, n, E, r]``.
        cores: ``[C, H, r, r]``.
        top_k: Slots to keep per head and query, at most n.

    Returns:
        Flat slot numbers ``row * n + col`` ``[..., H, K]``, best first, and the score of each core
        ``[..., H, K, C]`` in float32 or wider.
    """
    num_subkeys = row_keys.shape[1]
    dtype = torch.promote_types(row_queries.dtype, torch.float32)
    with torch.autocast(row_queries.device.type, enabled=False):
        cores = cores.to(dtype)
        rows = torch.einsum("...he,hner->...hnr", row_queries.to(dtype), row_keys.to(dtype))
        cols = torch.einsum("...he,hner->...hnr", col_queries.to(dtype), col_keys.to(dtype))
        with torch.no_grad():
            left, right = leading_vectors(cores.sum(dim=0))  # [H, r] each
            row_idx = torch.einsum("...hnr,hr->...hn", rows, left).topk(top_k, dim=-1).indices
            col_idx = torch.einsum("...hnr,hr->...hn", cols, right).topk(top_k, dim=-1).indices
        rank = cores.shape[-1]
        rows = rows.gather(-2, row_idx.unsqueeze(-1).expand(*row_idx.shape, rank))  # [..., H, K, r]
        cols = cols.gather(-2, col_idx.unsqueeze(-1).expand(*col_idx.shape, rank))
        scores = torch.einsum("...hir,chrs,...hjs->...hijc", rows, cores, cols)
    slots = row_idx.unsqueeze(-1) * num_subkeys + col_idx.unsqueeze(-2)  # [..., H, K, K]
    winners = scores.detach().sum(dim=-1).flatten(-2).topk(top_k, dim=-1).indices  # [..., H, K]
    num_cores = scores.shape[-1]
    per_core = scores.flatten(-3, -2).gather(
        -2, winners.unsqueeze(-1).expand(*winners.shape, num_cores)
    )
    return slots.flatten(-2).gather(-1, winners), per_core


def leading_vectors(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The leading left and right singular vectors of each matrix.

    A pair is defined up to one common sign; the left vector's sum is made positive, which is right
    for cores that start with positive entries.
    """
    # Of rank two, which is UltraMem's, by hand: a decomposition on a GPU waits for the CPU.
    decompose = _leading_of_two if matrices.shape[-2:] == (2, 2) else _leading
    left, right = decompose(matrices)
    sign = torch.where(left.sum(dim=-1, keepdim=True) < 0, -1.0, 1.0).to(left.dtype)
    return left * sign, right * sign


def _leading(matrices: Tensor) -> tuple[Tensor, Tensor]:
    u, _, vh = torch.linalg.svd(matrices)
    return u[..., 0], vh[..., 0, :]


def _leading_of_two(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The left vector is the long axis of the ellipse ``A A^T``, the right one its image."""
    gram = matrices @ matrices.mT
    angle = torch.atan2(2 * gram[..., 0, 1], gram[..., 0, 0] - gram[..., 1, 1]) / 2
    left = torch.stack((angle.cos(), angle.sin()), dim=-1)
    right = torch.einsum("...r,...rs->...s", left, matrices)
    return left, torch.nn.functional.normalize(right, dim=-1)

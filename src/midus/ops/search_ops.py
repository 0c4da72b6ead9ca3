"""The searches of the linear memory and of UltraMem, each by its reference or its kernels.

Beside those of `memory_ops.py`, which the paper's own layer uses.
"""

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.ops.dispatch import Backend, check_shape, takes_kernels
from midus.ops.linear_topk import library as _linear_topk_library  # noqa: F401
from midus.ops.linear_topk import reference as _linear_topk
from midus.ops.tucker_topk import library as _tucker_topk_library  # noqa: F401
from midus.ops.tucker_topk import reference as _tucker_topk

# What one program's registers hold: the winners of every token of its block, and for pairs of rows
# and columns their scores of every rank.
_MAX_TOP_K = 16
_MAX_RANK = 8


def linear_topk(
    queries: Tensor, keys: Tensor, top_k: int, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Finds the ``top_k`` best slots of every head, with one key a slot.

    Scores are accumulated and compared in float32 or wider whatever the inputs' types and whatever
    autocast says. Of equal scores the kernels take the lowest slot, the reference any.

    Args:
        queries: ``[..., H, E]``.
        keys: ``[H, N, E]``.
        top_k: Slots to keep per head and query, at most N.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        Slot numbers and their scores, both ``[..., H, K]``, best first.
    """
    if queries.dim() < 2 or keys.dim() != 3:
        raise MidusError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; expected "
            "[..., H, E] and [H, N, E]"
        )
    *_, num_heads, width = queries.shape
    check_shape("keys", keys, (num_heads, keys.shape[1], width))
    _check_top_k(top_k, keys.shape[1], "slots")
    if not (takes_kernels(backend, queries, keys) and _fits_kernels(backend, top_k)):
        return _linear_topk.linear_topk(queries, keys, top_k)
    found: tuple[Tensor, Tensor] = torch.ops.midus.linear_topk(queries, keys, top_k)
    return found


def tucker_topk(
    row_queries: Tensor,
    col_queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    cores: Tensor,
    top_k: int,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Finds slots of the grid whose score is ``sum_c row(i)^T core_c col(j)``.

    Rows and columns are chosen by the leading singular vectors of the summed cores (rank-1
    routing), and the K * K candidates by their exact scores, all in float32 or wider whatever
    autocast says. Of equal scores the kernels take the lowest row, column and slot, the reference
    any.

    Args:
        row_queries: ``[..., H, E]``.
        col_queries: ``[..., H, E]``.
        row_keys: ``[H, n, E, r]``.
        col_keys: ``[H, n, E, r]``.
        cores: ``[C, H, r, r]``.
        top_k: Slots to keep per head and query, at most n.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        Flat slot numbers ``row * n + col`` ``[..., H, K]``, best first, and the score of each core
        ``[..., H, K, C]``.
    """
    if row_queries.dim() < 2 or row_keys.dim() != 4 or cores.dim() != 4:
        raise MidusError(
            f"row_queries have shape {tuple(row_queries.shape)}, row_keys {tuple(row_keys.shape)} "
            f"and cores {tuple(cores.shape)}; expected [..., H, E], [H, n, E, r] and [C, H, r, r]"
        )
    *_, num_heads, width = row_queries.shape
    _, num_subkeys, _, rank = row_keys.shape
    check_shape("col_queries", col_queries, row_queries.shape)
    check_shape("row_keys", row_keys, (num_heads, num_subkeys, width, rank))
    check_shape("col_keys", col_keys, row_keys.shape)
    check_shape("cores", cores, (cores.shape[0], num_heads, rank, rank))
    _check_top_k(top_k, num_subkeys, "sub-keys")
    inputs = (row_queries, col_queries, row_keys, col_keys, cores)
    if not (takes_kernels(backend, *inputs) and _fits_kernels(backend, top_k, rank)):
        return _tucker_topk.tucker_topk(*inputs, top_k)
    slot_idx, scores, _, _ = torch.ops.midus.tucker_topk(*inputs, top_k)
    return slot_idx, scores


def _check_top_k(top_k: int, most: int, what: str) -> None:
    if not 1 <= top_k <= most:
        raise MidusError(
            f"top_k={top_k} is not between 1 and the {most} {what}; lower top_k or use more {what}"
        )


def _fits_kernels(backend: str, top_k: int, rank: int = 1) -> bool:
    if top_k <= _MAX_TOP_K and rank <= _MAX_RANK:
        return True
    if backend == "triton":
        raise MidusError(
            f"backend='triton' got top_k={top_k} and rank {rank}; the kernels keep up to "
            f"{_MAX_TOP_K} of rank up to {_MAX_RANK}, use backend='reference'"
        )
    return False

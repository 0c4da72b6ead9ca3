"""The searches of the linear memory and of UltraMem, each by its reference or its kernels.

Beside those of `memory_ops.py`, which the paper's own layer uses.
"""

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.ops.dispatch import Backend, check_shape, takes_kernels
from midus.ops.linear_topk import library as _linear_topk_library  # noqa: F401
from midus.ops.linear_topk import reference as _linear_topk

# What one program's registers hold: the winners of every token of its block.
_MAX_TOP_K = 16


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


def _check_top_k(top_k: int, most: int, what: str) -> None:
    if not 1 <= top_k <= most:
        raise MidusError(
            f"top_k={top_k} is not between 1 and the {most} {what}; lower top_k or use more {what}"
        )


def _fits_kernels(backend: str, top_k: int) -> bool:
    if top_k <= _MAX_TOP_K:
        return True
    if backend == "triton":
        raise MidusError(
            f"backend='triton' got top_k={top_k}; the kernels keep up to {_MAX_TOP_K}, use "
            "backend='reference'"
        )
    return False

"""Functions on tensors behind the memory layers; no modules, no transformers.

Every op has a plain PyTorch reference, and those that cost most have Triton kernels too. Which one
runs is decided here and nowhere else: `backend="auto"` takes the kernels for CUDA tensors of
16 or 32 bits (Ampere and later, NVIDIA) where Triton is installed, and the reference for
everything else.
"""

import functools
import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.ops.cross_entropy import reference as _cross_entropy
from midus.ops.gated import reference as _gated
from midus.ops.headwise_memory import library as _headwise_memory_library
from midus.ops.headwise_memory import reference as _headwise_memory
from midus.ops.linear_topk.reference import linear_topk
from midus.ops.product_key_topk import library as _product_key_topk_library  # noqa: F401
from midus.ops.product_key_topk import reference as _product_key_topk
from midus.ops.rotary import reference as _rotary
from midus.ops.token_step import reference as _token_step
from midus.ops.tucker_topk.reference import tucker_topk
from midus.ops.weighted_gather import library as _weighted_gather_library  # noqa: F401
from midus.ops.weighted_gather import reference as _weighted_gather

Backend = Literal["auto", "reference", "triton"]
Search = Literal["auto", "two_stage", "cartesian"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_KERNEL_TYPES = (torch.float16, torch.bfloat16, torch.float32)
# Up to here one program a token and head, over the whole grid, is as fast as two stages over a
# block of tokens (`ops/product_key_topk/README.md`).
_CARTESIAN_TOKENS = 4
_CARTESIAN_SUBKEYS = 64
# What one program's registers hold: a side of the whole grid, the scores and pairs of two stages.
_MAX_GRID = 128
_MAX_SUBKEYS = 512
_MAX_TOP_K = 32


def product_key_topk(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    top_k: int,
    backend: Backend = "auto",
    search: Search = "auto",
) -> tuple[Tensor, Tensor]:
    """Finds the ``top_k`` best slots of every head's product keys.

    Scores are accumulated and compared in float32 or wider whatever the inputs' types and whatever
    autocast says, so that bfloat16 inputs pick the slots float32 arithmetic picks. Of equal scores
    the lowest slot wins.

    Args:
        queries: ``[..., H, E]``; the first half of E meets the row keys, the second the columns.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        top_k: Slots to keep per head and query, at most n.
        backend: ``auto``, ``reference`` or ``triton``.
        search: ``two_stage``, ``cartesian`` (all n * n pairs at once), or ``auto`` by size.

    Returns:
        Flat slot numbers ``row * n + col`` and their scores, both ``[..., H, K]``, best first.
    """
    _check_keys(queries, row_keys, col_keys, top_k)
    use_triton = _use_triton(backend, queries, row_keys, col_keys) and _fits_kernels(
        backend, row_keys.shape[1], top_k
    )
    cartesian = _use_cartesian(search, queries, row_keys, use_triton)
    if not use_triton:
        return _product_key_topk.product_key_topk(queries, row_keys, col_keys, top_k, cartesian)
    found: tuple[Tensor, Tensor] = torch.ops.midus.product_key_topk(
        queries, row_keys, col_keys, top_k, cartesian
    )
    return found


def weighted_gather(
    values: Tensor, slot_idx: Tensor, weights: Tensor, backend: Backend = "auto"
) -> Tensor:
    """Sums the rows of a table that each query selected, by their weights.

    Args:
        values: ``[N, R]``.
        slot_idx: ``[..., K]`` row numbers.
        weights: ``[..., K]``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., R]`` in the type of ``values``, summed in float32 or wider.
    """
    if slot_idx.shape != weights.shape:
        raise MidusError(
            f"slot_idx has shape {tuple(slot_idx.shape)} and weights {tuple(weights.shape)}; "
            "every selected row needs one weight"
        )
    if not _use_triton(backend, values, weights):
        return _weighted_gather.weighted_gather(values, slot_idx, weights)
    out: Tensor = torch.ops.midus.weighted_gather(values, slot_idx, weights)
    return out


def headwise_memory(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    latent_values: Tensor,
    value_proj: Tensor,
    top_k: int,
    backend: Backend = "auto",
    search: Search = "auto",
) -> Tensor:
    """The whole head-wise memory layer: Top-k, softmax, weighted sum, projection (paper, Eq. 5).

    Selection is always in float32 or wider. Under autocast the table and the projections are cast
    to its type, as for any matrix product; queries and keys are taken as they are.

    Args:
        queries: ``[..., H, E]``.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        latent_values: ``[n * n, R]``, shared by the heads.
        value_proj: ``[H, R, O]``.
        top_k: Slots to read per head and query, at most n.
        backend: ``auto``, ``reference`` or ``triton``.
        search: ``two_stage``, ``cartesian``, or ``auto`` by size.

    Returns:
        ``[..., H, O]`` in the type of the values.
    """
    _check_keys(queries, row_keys, col_keys, top_k)
    num_heads, num_subkeys, _ = row_keys.shape
    if value_proj.dim() != 3 or value_proj.shape[0] != num_heads:
        raise MidusError(
            f"value_proj has shape {tuple(value_proj.shape)}, expected [{num_heads}, R, O]"
        )
    _check_shape("latent_values", latent_values, (num_subkeys**2, value_proj.shape[1]))
    latent_values, value_proj = _one_type(latent_values, value_proj)
    inputs = (queries, row_keys, col_keys, latent_values, value_proj)
    use_triton = _use_triton(backend, *inputs) and _fits_kernels(backend, row_keys.shape[1], top_k)
    cartesian = _use_cartesian(search, queries, row_keys, use_triton)
    if not use_triton:
        return _headwise_memory.headwise_memory(*inputs, top_k, cartesian)
    args = (*inputs, top_k, cartesian)
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    out: Tensor
    if torch.compiler.is_compiling() or type(queries) is not Tensor:
        out = torch.ops.midus.headwise_memory(*args, save)[0]
    elif save:
        out = _headwise_memory_library.HeadwiseMemory.apply(*args)  # type: ignore[no-untyped-call]
    else:
        out = _headwise_memory_library.run_forward(*args, False)[0]
    return out


def headwise_memory_cached(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    backend: Backend = "auto",
    search: Search = "auto",
) -> Tensor:
    """``headwise_memory`` for inference, from values every head has projected already.

    Args:
        queries: ``[..., H, E]``.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        value_cache: ``[H, n * n, O]``, ``latent_values @ value_proj[h]`` for each head.
        top_k: Slots to read per head and query, at most n.
        backend: ``auto``, ``reference`` or ``triton``.
        search: ``two_stage``, ``cartesian``, or ``auto`` by size.

    Returns:
        ``[..., H, O]`` in the type of the cache. The kernels have no gradient.
    """
    _check_keys(queries, row_keys, col_keys, top_k)
    num_heads, num_subkeys, _ = row_keys.shape
    _check_shape("value_cache", value_cache, (num_heads, num_subkeys**2, value_cache.shape[-1]))
    use_triton = _use_triton(backend, queries, row_keys, col_keys, value_cache) and _fits_kernels(
        backend, row_keys.shape[1], top_k
    )
    cartesian = _use_cartesian(search, queries, row_keys, use_triton)
    inputs = (row_keys, col_keys, value_cache, top_k, cartesian)
    if not use_triton:
        return _headwise_memory.headwise_memory_cached(queries, *inputs)
    is_plain = type(queries) is Tensor and not torch.is_grad_enabled()
    if is_plain and not torch.compiler.is_compiling():
        return _headwise_memory_library.run_cached(queries, *inputs)
    out: Tensor = torch.ops.midus.headwise_memory_cached(queries, *inputs)
    return out


def rotate_heads(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotary position embeddings of queries and keys.

    Args:
        queries: ``[B, T, H, E]``.
        keys: ``[B, T, V, E]``, of the same type.
        cos: ``[1 or B, T, E]``.
        sin: ``[1 or B, T, E]``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        Both, in the same shapes; the kernels keep their type, the reference the wider one.
    """
    for name, tensor in (("cos", cos), ("sin", sin)):
        _check_shape(name, tensor, (*tensor.shape[:1], *queries.shape[1:2], queries.shape[3]))
    # Compilers fuse the plain version by themselves. Under autocast the angles alone are wider.
    angles = (queries.dtype, torch.float32)
    plain = not _is_real(queries) or queries.dtype != keys.dtype or cos.dtype not in angles
    if plain or not _use_triton(backend, queries, keys, cos, sin):
        return _rotary.rotate_heads(queries, keys, cos, sin)
    from midus.ops.rotary import kernels

    if torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad):
        turned: tuple[Tensor, Tensor] = kernels.RotateHeads.apply(  # type: ignore[no-untyped-call]
            queries, keys, cos, sin
        )
        return turned
    return kernels.rotate(queries, keys, cos, sin, False)


def project_token(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor | None,
    backend: Backend = "auto",
) -> Tensor:
    """Norm, q/k/v projections and rotary embeddings of one token of one sequence; no gradient.

    Args:
        hidden: ``[..., D]`` of one token.
        norm_weight: ``[D]``, of an RMSNorm.
        eps: Of that norm.
        weights: ``[H * E, D]`` and twice ``[V * E, D]``, contiguous.
        biases: One for each or none.
        cos: ``[..., E]``.
        sin: ``[..., E]``.
        keys: ``[1, V, L, E]``; one slot is written.
        values: ``[1, V, L, E]``; likewise.
        position: Which slot, an integer on the device; the first where None.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        Queries ``[1, H, E]``.
    """
    args = (hidden, norm_weight, eps, weights, biases, cos, sin, keys, values, position)
    if not _use_triton(backend, hidden, norm_weight, *weights, cos, sin, keys, values):
        return _token_step.project_token(*args)
    from midus.ops.token_step import kernels

    return kernels.project_token(*args)


def attend_token(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
    count: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of one token a sequence over a cache; no gradient.

    Args:
        queries: ``[B, H, E]``.
        keys: ``[B, V, L, E]``.
        values: ``[B, V, L, E]``.
        length: Slots in use; as an integer on the device, those before this token's.
        mask: Slots that count, ``[B, L]`` booleans, or None.
        scale: Factor of the scores.
        count: Add one to a length on the device.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[B, H, E]``.
    """
    if not _use_triton(backend, queries, keys, values):
        return _token_step.attend_token(queries, keys, values, length, mask, scale, count)
    from midus.ops.token_step import kernels

    return kernels.attend_token(queries, keys, values, length, mask, scale, count)


def gate_token(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_weight: Tensor,
    up_weight: Tensor,
    backend: Backend = "auto",
) -> Tensor:
    """``silu(W_gate norm(x)) * W_up norm(x)`` of one token; no gradient.

    Args:
        hidden: ``[..., D]`` of one token.
        norm_weight: ``[D]``, of an RMSNorm.
        eps: Of that norm.
        gate_weight: ``[I, D]``, contiguous.
        up_weight: ``[I, D]``, contiguous.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., I]``.
    """
    args = (hidden, norm_weight, eps, gate_weight, up_weight)
    if not _use_triton(backend, hidden, norm_weight, gate_weight, up_weight):
        return _token_step.gate_token(*args)
    from midus.ops.token_step import kernels

    return kernels.gate_token(*args)


def linear_token(
    inputs: Tensor, weight: Tensor, residual: Tensor, backend: Backend = "auto"
) -> Tensor:
    """``residual + W x`` of one token; no gradient.

    Args:
        inputs: ``[..., I]`` of one token.
        weight: ``[O, I]``, contiguous.
        residual: ``[..., O]``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., O]``.
    """
    if not _use_triton(backend, inputs, weight, residual):
        return _token_step.linear_token(inputs, weight, residual)
    from midus.ops.token_step import kernels

    return kernels.linear_token(inputs, weight, residual)


def gated(gate: Tensor, up: Tensor, backend: Backend = "auto") -> Tensor:
    """``silu(gate) * up``, one pass each way; keeps its inputs alone for the gradient.

    Args:
        gate: Any shape.
        up: The same.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        The same shape.
    """
    _check_shape("up", up, tuple(gate.shape))
    plain = not _is_real(gate) or gate.dtype != up.dtype
    if plain or not _use_triton(backend, gate, up):
        return _gated.gated(gate, up)
    from midus.ops.gated import kernels

    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out: Tensor = kernels.Gated.apply(gate, up)  # type: ignore[no-untyped-call]  # torch
        return out
    return kernels.gated_forward(gate, up)


def cross_entropy_(
    logits: Tensor, targets: Tensor, ignored: int, backend: Backend = "auto"
) -> Tensor:
    """The summed cross-entropy of rows of logits, which become its gradient.

    Args:
        logits: ``[T, vocabulary]``, rows contiguous; overwritten.
        targets: ``[T]``.
        ignored: The target of rows that do not count.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        The sum, in float32 or wider.
    """
    if not (_is_real(logits) and _use_triton(backend, logits)):
        return _cross_entropy.cross_entropy_(logits, targets, ignored)
    from midus.ops.cross_entropy import kernels

    return kernels.cross_entropy_(logits, targets, ignored)


def attend_and_read(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
    hidden: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    backend: Backend = "auto",
    search: Search = "auto",
) -> Tensor:
    """``attend_token``, then ``headwise_memory_cached``, then the residual; no gradient.

    Args:
        queries: ``[B, H, E]``; this and what follows up to ``scale`` as in ``attend_token``.
        keys: ``[B, V, L, E]``.
        values: ``[B, V, L, E]``.
        length: Slots in use; as an integer on the device it is counted up.
        mask: ``[B, L]`` booleans, or None.
        scale: Factor of the scores.
        hidden: ``[B, H * O]``, the residual stream.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        value_cache: ``[H, n * n, O]``.
        top_k: Slots to read per head.
        backend: ``auto``, ``reference`` or ``triton``.
        search: ``two_stage``, ``cartesian``, or ``auto``: two stages.

    Returns:
        ``[B, H * O]``.
    """
    _check_keys(queries, row_keys, col_keys, top_k)
    inputs = (queries, keys, values, hidden, row_keys, col_keys, value_cache)
    use_triton = _use_triton(backend, *inputs) and _fits_kernels(backend, row_keys.shape[1], top_k)
    # Here a program has one token whatever the search, and two stages are the faster.
    search = "two_stage" if search == "auto" else search
    cartesian = _use_cartesian(search, queries, row_keys, use_triton)
    attended = (queries, keys, values, length, mask, scale)
    memory = (hidden, row_keys, col_keys, value_cache, top_k, cartesian)
    if not use_triton:
        return _token_step.attend_and_read(*attended, *memory)
    from midus.ops.token_step import kernels

    return kernels.attend_and_read(*attended, *memory)


def _check_keys(queries: Tensor, row_keys: Tensor, col_keys: Tensor, top_k: int) -> None:
    if queries.dim() < 2 or row_keys.dim() != 3:
        raise MidusError(
            f"queries have shape {tuple(queries.shape)} and row_keys {tuple(row_keys.shape)}; "
            "expected [..., H, E] and [H, n, E/2]"
        )
    num_heads, width = queries.shape[-2:]
    num_subkeys = row_keys.shape[1]
    _check_shape("row_keys", row_keys, (num_heads, num_subkeys, width // 2))
    _check_shape("col_keys", col_keys, (num_heads, num_subkeys, width // 2))
    if width % 2:
        raise MidusError(f"queries are {width} wide; product keys need an even width")
    if not 1 <= top_k <= num_subkeys:
        raise MidusError(
            f"top_k={top_k} is not between 1 and the {num_subkeys} sub-keys; lower top_k or use "
            "more sub-keys"
        )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    # The kernels trust shapes: a wrong one would read memory that is not there.
    if tensor.shape != shape:
        raise MidusError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def _use_triton(backend: str, *tensors: Tensor) -> bool:
    if backend == "reference":
        return False
    if backend not in ("auto", "triton"):
        raise MidusError(f"backend={backend!r} is unknown; choose auto, reference or triton")
    right_types = all(tensor.dtype in _KERNEL_TYPES for tensor in tensors)
    if backend == "auto":
        return _HAS_TRITON and right_types and tensors[0].is_cuda and _suits(tensors[0].device)
    if not _HAS_TRITON:
        raise MidusError("backend='triton' needs the package triton; install midus[triton]")
    if not right_types:
        wrong = next(t.dtype for t in tensors if t.dtype not in _KERNEL_TYPES)
        raise MidusError(
            f"backend='triton' got a {wrong} tensor, and the kernels take float16, bfloat16 and "
            "float32; use backend='reference'"
        )
    if not (tensors[0].is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise MidusError(
            f"backend='triton' got tensors on {tensors[0].device}; move them to a CUDA device, or "
            "use backend='auto'"
        )
    return True


def _is_real(tensor: Tensor) -> bool:
    """Whether a kernel can be launched on it: no compiler's stand-in, no subclass."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def _suits(device: torch.device) -> bool:
    """Whether kernels are for this device and this call: not before Ampere, not in torch.func."""
    if torch.compiler.is_compiling():
        return True
    return _is_recent(device) and not torch._C._are_functorch_transforms_active()


@functools.cache
def _is_recent(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _fits_kernels(backend: str, num_subkeys: int, top_k: int) -> bool:
    """Whether one program's registers hold a search of this size."""
    if num_subkeys <= _MAX_SUBKEYS and top_k <= _MAX_TOP_K:
        return True
    if backend == "triton":
        raise MidusError(
            f"backend='triton' got {num_subkeys} sub-keys and top_k={top_k}; the kernels search up "
            f"to {_MAX_SUBKEYS} for up to {_MAX_TOP_K}, use backend='reference'"
        )
    return False


def _use_cartesian(search: str, queries: Tensor, row_keys: Tensor, use_triton: bool) -> bool:
    if search not in ("auto", "two_stage", "cartesian"):
        raise MidusError(f"search={search!r} is unknown; choose auto, two_stage or cartesian")
    num_subkeys = row_keys.shape[1]
    if search == "cartesian" and use_triton and num_subkeys > _MAX_GRID:
        raise MidusError(
            f"search='cartesian' got {num_subkeys} sub-keys, and kernels hold a grid of at most "
            f"{_MAX_GRID} a side; use search='two_stage'"
        )
    if search != "auto" or not use_triton or num_subkeys > _CARTESIAN_SUBKEYS:
        return search == "cartesian"
    return queries.shape[:-2].numel() <= _CARTESIAN_TOKENS


def _one_type(latent_values: Tensor, value_proj: Tensor) -> tuple[Tensor, Tensor]:
    device = latent_values.device.type
    if torch.is_autocast_enabled(device) and latent_values.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    else:
        if latent_values.dtype == value_proj.dtype:
            return latent_values, value_proj
        dtype = torch.promote_types(latent_values.dtype, value_proj.dtype)
    return latent_values.to(dtype), value_proj.to(dtype)


__all__ = [
    "attend_and_read",
    "attend_token",
    "cross_entropy_",
    "gate_token",
    "gated",
    "headwise_memory",
    "headwise_memory_cached",
    "linear_token",
    "linear_topk",
    "product_key_topk",
    "project_token",
    "rotate_heads",
    "tucker_topk",
    "weighted_gather",
]

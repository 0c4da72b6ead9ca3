"""What blocks compute beside their memory: norm, rotation, gate, loss; one token of a block."""

import torch
from torch import Tensor

from midus.ops.cross_entropy import reference as _cross_entropy
from midus.ops.dispatch import Backend, check_shape, is_real, takes_kernels
from midus.ops.gated import reference as _gated
from midus.ops.rms_norm import reference as _rms_norm
from midus.ops.rotary import reference as _rotary
from midus.ops.token_step import reference as _token_step

# A row of the norm's kernels is in registers, and their arguments name each reader's gradient.
_MAX_WIDTH, _MAX_READERS = 16_384, 4


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
        check_shape(name, tensor, (*tensor.shape[:1], *queries.shape[1:2], queries.shape[3]))
    # Compilers fuse the plain version by themselves. Under autocast the angles alone are wider.
    angles = (queries.dtype, torch.float32)
    plain = not is_real(queries) or queries.dtype != keys.dtype or cos.dtype not in angles
    if plain or not takes_kernels(backend, queries, keys, cos, sin):
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
    position: int | Tensor,
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
        position: Which slot; may be an integer on the device.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        Queries ``[1, H, E]``.
    """
    # Imported from the module itself, not from its package, which takes longer at every call.
    if takes_kernels(backend, hidden, norm_weight, *weights, cos, sin, keys, values):
        from midus.ops.token_step.product_kernels import project_token as run
    else:
        from midus.ops.token_step.reference import project_token as run
    return run(hidden, norm_weight, eps, weights, biases, cos, sin, keys, values, position)


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
    if not takes_kernels(backend, queries, keys, values):
        return _token_step.attend_token(queries, keys, values, length, mask, scale, count)
    from midus.ops.token_step import attention_kernels

    return attention_kernels.attend_token(queries, keys, values, length, mask, scale, count)


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
    if not takes_kernels(backend, hidden, norm_weight, gate_weight, up_weight):
        return _token_step.gate_token(*args)
    from midus.ops.token_step import product_kernels

    return product_kernels.gate_token(*args)


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
    if not takes_kernels(backend, inputs, weight, residual):
        return _token_step.linear_token(inputs, weight, residual)
    from midus.ops.token_step import product_kernels

    return product_kernels.linear_token(inputs, weight, residual)


def gated(gate: Tensor, up: Tensor, backend: Backend = "auto") -> Tensor:
    """``silu(gate) * up``, one pass each way; keeps its inputs alone for the gradient.

    Args:
        gate: Any shape.
        up: The same.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        The same shape.
    """
    check_shape("up", up, tuple(gate.shape))
    plain = not is_real(gate) or gate.dtype != up.dtype
    if plain or not takes_kernels(backend, gate, up):
        return _gated.gated(gate, up)
    from midus.ops.gated import kernels

    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        out: Tensor = kernels.Gated.apply(gate, up)  # type: ignore[no-untyped-call]  # torch
        return out
    return kernels.gated_forward(gate, up)


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_readers: int = 1,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """The residual stream, and its RMSNorm for each reader; keeps the stream and a number a row.

    The stream is to be read on from the output, so that its gradient and the readers' are summed
    in the same pass. Readers' tensors share memory.

    Args:
        hidden: ``[..., D]``.
        weight: ``[D]``.
        eps: Added to the mean of squares.
        added: What is added to the stream before it is normed, in its shape, or None.
        dtype: Of the norm; by default what stream and weight make together.
        num_readers: How often the norm is returned.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``hidden + added``, and ``num_readers`` times its norm.
    """
    check_shape("weight", weight, tuple(hidden.shape[-1:]))
    if added is not None:
        check_shape("added", added, tuple(hidden.shape))
    tensors = [hidden, weight] if added is None else [hidden, weight, added]
    dtype = torch.promote_types(hidden.dtype, weight.dtype) if dtype is None else dtype
    plain = (
        not all(is_real(tensor) for tensor in tensors)
        or hidden.shape[-1] > _MAX_WIDTH
        or num_readers > _MAX_READERS
        # The kernels write the sum in the stream's type.
        or (added is not None and torch.promote_types(hidden.dtype, added.dtype) != hidden.dtype)
    )
    if plain or not takes_kernels(backend, *tensors):
        return _rms_norm.rms_norm(hidden, weight, eps, added, dtype, num_readers)
    from midus.ops.rms_norm import kernels

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        out: tuple[Tensor, ...] = kernels.RmsNorm.apply(  # type: ignore[no-untyped-call]  # torch
            hidden, weight, added, eps, dtype, num_readers
        )
        return out
    stream, normed, _ = kernels.rms_norm_forward(hidden, weight, eps, added, dtype)
    return stream, *(normed,) * num_readers


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
    if not (is_real(logits) and takes_kernels(backend, logits)):
        return _cross_entropy.cross_entropy_(logits, targets, ignored)
    from midus.ops.cross_entropy import kernels

    return kernels.cross_entropy_(logits, targets, ignored)

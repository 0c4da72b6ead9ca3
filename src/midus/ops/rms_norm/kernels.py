"""The RMSNorm of a residual stream as one Triton kernel each way, sums around it included.

Forward adds what a block has written to the stream before it norms it; backward sums the gradients
of all readers and of the stream itself while it has them in registers.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, power_of_two
from midus.ops.launch import Constants, launch

_MAX_READERS = 4
# Programs that share the sum of the weight's gradient: a dozen for each multiprocessor of a large
# GPU, and few enough that their shares are a small part of what is read.
_PROGRAMS = 2048


@triton.jit
def _rms_norm_fwd_kernel(
    hidden, added, weight, stream, normed, scales, eps, stride_hidden, stride_added,
    width: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """``x = hidden + added; normed = weight * (x * scale); scale = 1 / sqrt(mean(x²) + eps)``."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < width
    x = tl.load(hidden + row * stride_hidden + col, mask=mask, other=0.0)
    w = tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        more = tl.load(added + row * stride_added + col, mask=mask, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        tl.store(stream + row * width + col, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    tl.store(scales + row, scale)
    # Rounded to the stream's type before it meets the weight, as transformers does.
    y = (wide * scale).to(x.dtype).to(tl.float32) * w
    tl.store(normed + row * width + col, y.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_bwd_kernel(
    stream, weight, scales, grad_0, grad_1, grad_2, grad_3, grad_stream,
    grad_hidden, grad_added, partials, num_rows, rows_each, stride_stream,
    width: tl.constexpr, BLOCK: tl.constexpr, NUM_GRADS: tl.constexpr, HAS_STREAM: tl.constexpr,
    TO_HIDDEN: tl.constexpr, TO_ADDED: tl.constexpr, TO_WEIGHT: tl.constexpr,
):  # fmt: skip
    """``dx = dstream + scale (g - n mean(g n)); g = w dy, n = x scale; dw = sum of dy n``."""
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < width
    w = tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    first = program * rows_each
    for row in range(first, tl.minimum(first + rows_each, num_rows)):
        where = row * width + col
        x = tl.load(stream + row * stride_stream + col, mask=mask, other=0.0)
        scale = tl.load(scales + row)
        dy = tl.load(grad_0 + where, mask=mask, other=0.0).to(tl.float32)
        if NUM_GRADS > 1:
            dy += tl.load(grad_1 + where, mask=mask, other=0.0).to(tl.float32)
        if NUM_GRADS > 2:
            dy += tl.load(grad_2 + where, mask=mask, other=0.0).to(tl.float32)
        if NUM_GRADS > 3:
            dy += tl.load(grad_3 + where, mask=mask, other=0.0).to(tl.float32)
        n = x.to(tl.float32) * scale
        if TO_WEIGHT:
            total += dy * n.to(x.dtype).to(tl.float32)
        if TO_HIDDEN or TO_ADDED:
            g = dy * w
            dx = scale * (g - n * (tl.sum(g * n, axis=0) / width))
            if HAS_STREAM:
                dx += tl.load(grad_stream + where, mask=mask, other=0.0).to(tl.float32)
            if TO_HIDDEN:
                tl.store(grad_hidden + where, dx.to(grad_hidden.dtype.element_ty), mask=mask)
            if TO_ADDED:
                tl.store(grad_added + where, dx.to(grad_added.dtype.element_ty), mask=mask)
    if TO_WEIGHT:
        tl.store(partials + program * width + col, total, mask=mask)


def rms_norm_forward(
    hidden: Tensor, weight: Tensor, eps: float, added: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream (``hidden`` itself if nothing is added), its norm and the rows' scales."""
    width = hidden.shape[-1]
    rows = _rows(hidden)
    normed = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
    more, stream = rows, hidden
    if added is not None:
        more, stream = (
            _rows(added),
            torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device),
        )
    if hidden.numel():
        launch(
            _rms_norm_fwd_kernel,
            (len(rows),),
            (
                rows,
                more,
                weight.contiguous(),
                stream,
                normed,
                scales,
                eps,
                rows.stride(0),
                more.stride(0),
            ),
            _forward_constants(width, added is not None),
        )
    return stream, normed, scales


def rms_norm_backward(
    stream: Tensor,
    weight: Tensor,
    scales: Tensor,
    grads: list[Tensor],
    grad_stream: Tensor | None,
    to_hidden: bool,
    added: torch.dtype | None,
    to_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``hidden``, ``added`` and ``weight``, of those that are asked for.

    Args:
        stream: What was normed.
        weight: ``[D]``.
        scales: One for each row.
        grads: Of the readers, one at least.
        grad_stream: Of the stream, where it goes on.
        to_hidden: Whether ``hidden`` wants one.
        added: The type of what was added, if that wants one.
        to_weight: Whether the weight wants one.
    """
    width, rows = stream.shape[-1], _rows(stream)
    num_rows = len(rows)
    rows_each = ceil_div(num_rows, _PROGRAMS) if to_weight else 1
    num_programs = ceil_div(num_rows, rows_each) if num_rows else 0

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=stream.device)

    # One tensor serves both where their types are the same; places nobody writes hold the scales.
    is_shared = to_hidden and added == stream.dtype
    grad_hidden = empty(stream.dtype, *stream.shape) if to_hidden else scales
    own = None if is_shared else added
    grad_added = scales if own is None else empty(own, *stream.shape)
    partials = empty(torch.float32, num_programs, width) if to_weight else scales
    if stream.numel():
        grads = [grad.contiguous() for grad in grads]
        launch(
            _rms_norm_bwd_kernel,
            (num_programs,),
            (
                rows,
                weight.contiguous(),
                scales,
                *grads,
                *[scales] * (_MAX_READERS - len(grads)),
                scales if grad_stream is None else grad_stream.contiguous(),
                grad_hidden,
                grad_added,
                partials,
                num_rows,
                rows_each,
                rows.stride(0),
            ),
            _backward_constants(
                width, len(grads), grad_stream is not None, to_hidden, own is not None, to_weight
            ),
        )
    to_added = None if added is None else grad_hidden if is_shared else grad_added
    return (
        grad_hidden if to_hidden else None,
        to_added,
        partials.sum(0).to(weight.dtype) if to_weight else None,
    )


@functools.cache
def _forward_constants(width: int, has_added: bool) -> Constants:
    block = power_of_two(width, 32)
    # Up to 1,024 numbers a warp: a narrow row needs no exchange between warps.
    return Constants(
        width=width, BLOCK=block, HAS_ADDED=has_added, num_warps=min(max(block // 1024, 1), 16)
    )


@functools.cache
def _backward_constants(
    width: int,
    num_grads: int,
    has_stream: bool,
    to_hidden: bool,
    to_added: bool,
    to_weight: bool,
) -> Constants:
    block = power_of_two(width, 32)
    return Constants(
        width=width,
        BLOCK=block,
        NUM_GRADS=num_grads,
        HAS_STREAM=has_stream,
        TO_HIDDEN=to_hidden,
        TO_ADDED=to_added,
        TO_WEIGHT=to_weight,
        num_warps=min(max(block // 512, 1), 16),
    )


def _rows(tensor: Tensor) -> Tensor:
    """``[rows, D]`` with D contiguous, without a copy where strides allow it."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class RmsNorm(torch.autograd.Function):
    """The kernels; every reader has an output of its own, so that all gradients come here."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        added: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        num_readers: int,
    ) -> tuple[Tensor, ...]:
        stream, normed, scales = rms_norm_forward(hidden, weight, eps, added, dtype)
        ctx.save_for_backward(stream, weight, scales)
        ctx.set_materialize_grads(False)
        ctx.added_dtype = None if added is None else added.dtype
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):
            ctx.mark_non_differentiable(stream)
        return stream, normed, *(normed.detach() for _ in range(num_readers - 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_stream: Tensor | None, *grads: Tensor | None) -> Any:
        stream, weight, scales = ctx.saved_tensors
        to_hidden, to_weight, to_added = ctx.needs_input_grad[:3]
        dtype = ctx.added_dtype if to_added else None
        given = [grad for grad in grads if grad is not None]
        if not given:  # nobody has read the norm, the stream alone goes on
            cast = None if dtype is None or grad_stream is None else grad_stream.to(dtype)
            return grad_stream if to_hidden else None, None, cast, None, None, None
        grad_hidden, grad_added, grad_weight = rms_norm_backward(
            stream, weight, scales, given, grad_stream, to_hidden, dtype, to_weight
        )
        return grad_hidden, grad_weight, grad_added, None, None, None

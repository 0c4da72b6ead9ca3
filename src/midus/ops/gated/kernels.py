"""The gate of a Llama FFN as one Triton kernel each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div
from midus.ops.launch import Constants, launch

_BLOCK = 2048
_CONSTANTS = Constants(BLOCK=_BLOCK, num_warps=4)


@triton.jit  # a size that 16 divides lets loads be wide
def _gated_fwd_kernel(gate, up, out, size, BLOCK: tl.constexpr):
    """``out = silu(gate) * up``."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = where < size
    g, u = tl.load(gate + where, mask=mask), tl.load(up + where, mask=mask)
    wide = g.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(g.dtype).to(tl.float32)
    tl.store(out + where, (opened * u.to(tl.float32)).to(g.dtype), mask=mask)


@triton.jit
def _gated_bwd_kernel(grad, gate, up, grad_gate, grad_up, size, BLOCK: tl.constexpr):
    """Gradients of both."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = where < size
    dy = tl.load(grad + where, mask=mask).to(tl.float32)
    g = tl.load(gate + where, mask=mask).to(tl.float32)
    u = tl.load(up + where, mask=mask).to(tl.float32)
    share = tl.sigmoid(g)
    dtype = grad_gate.dtype.element_ty
    tl.store(grad_gate + where, (dy * u * share * (1 + g * (1 - share))).to(dtype), mask=mask)
    tl.store(grad_up + where, (dy * g * share).to(dtype), mask=mask)


def gated_forward(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if gate.numel():
        launch(
            _gated_fwd_kernel,
            (ceil_div(gate.numel(), _BLOCK),),
            (gate, up, out, gate.numel()),
            _CONSTANTS,
        )
    return out


class Gated(torch.autograd.Function):
    """The kernels and their gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gated_forward(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            launch(
                _gated_bwd_kernel,
                (ceil_div(gate.numel(), _BLOCK),),
                (grad.contiguous(), gate, up, grad_gate, grad_up, gate.numel()),
                _CONSTANTS,
            )
        return grad_gate, grad_up

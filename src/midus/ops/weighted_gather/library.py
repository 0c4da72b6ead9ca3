"""The Triton kernels as PyTorch operators: what compilers, autograd and graphs see of them."""

from typing import Any

import torch
from torch import Tensor

from midus.ops.gradients import refuse_gradient

_INPUTS = "Tensor values, Tensor slot_idx, Tensor weights"

torch.library.define("midus::weighted_gather", f"({_INPUTS}) -> Tensor")
torch.library.define(
    "midus::weighted_gather_backward",
    f"(Tensor grad_out, {_INPUTS}, bool[] needs) -> (Tensor, Tensor)",
)


# Triton is imported at the first call: it is slow to import, and absent on some machines.
@torch.library.impl("midus::weighted_gather", ("cpu", "cuda"))
def _forward(*args: Any) -> Tensor:
    from midus.ops.weighted_gather.kernels import weighted_gather_forward

    return weighted_gather_forward(*args)


@torch.library.impl("midus::weighted_gather_backward", ("cpu", "cuda"))
def _backward(*args: Any) -> tuple[Tensor, Tensor]:
    from midus.ops.weighted_gather.kernels import weighted_gather_backward

    return weighted_gather_backward(*args)


@torch.library.register_fake("midus::weighted_gather")
def _fake_forward(values: Tensor, slot_idx: Tensor, weights: Tensor) -> Tensor:
    return values.new_empty((*slot_idx.shape[:-1], values.shape[1]))


@torch.library.register_fake("midus::weighted_gather_backward")
def _fake_backward(
    grad_out: Tensor, values: Tensor, slot_idx: Tensor, weights: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    return (
        values.new_empty(values.shape if needs[0] else 0),
        weights.new_empty(weights.shape if needs[1] else 0),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    needs_values, _, needs_weights = ctx.needs_input_grad
    grad_values, grad_weights = torch.ops.midus.weighted_gather_backward(
        grad_out, *ctx.saved_tensors, (needs_values, needs_weights)
    )
    return grad_values if needs_values else None, None, grad_weights if needs_weights else None


torch.library.register_autograd(
    "midus::weighted_gather", _gradients, setup_context=_save_for_backward
)
refuse_gradient("midus::weighted_gather_backward", "second derivative")

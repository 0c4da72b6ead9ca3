"""The Triton kernels as PyTorch operators: what compilers, autograd and graphs see of them."""

from typing import Any

import torch
from torch import Tensor

from midus.ops.gradients import refuse_gradient

_INPUTS = "Tensor queries, Tensor keys"

torch.library.define("midus::linear_topk", f"({_INPUTS}, int top_k) -> (Tensor, Tensor)")
torch.library.define(
    "midus::linear_topk_backward",
    f"(Tensor grad_scores, Tensor slot_idx, {_INPUTS}) -> (Tensor, Tensor)",
)


# Triton is imported at the first call: it is slow to import, and absent on some machines.
@torch.library.impl("midus::linear_topk", ("cpu", "cuda"))
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    from midus.ops.linear_topk.kernels import linear_topk_forward

    return linear_topk_forward(*args)


@torch.library.impl("midus::linear_topk_backward", ("cpu", "cuda"))
def _backward(*args: Any) -> tuple[Tensor, Tensor]:
    from midus.ops.linear_topk.kernels import linear_topk_backward

    return linear_topk_backward(*args)


@torch.library.register_fake("midus::linear_topk")
def _fake_forward(queries: Tensor, keys: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (*queries.shape[:-1], top_k)
    return (
        queries.new_empty(shape, dtype=torch.int64),
        queries.new_empty(shape, dtype=torch.float32),
    )


@torch.library.register_fake("midus::linear_topk_backward")
def _fake_backward(grad_scores: Tensor, slot_idx: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[0], *inputs[:2])
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, _: None, grad_scores: Tensor | None) -> tuple[Any, ...]:
    if grad_scores is None:
        return (None,) * 3
    grads = torch.ops.midus.linear_topk_backward(grad_scores, *ctx.saved_tensors)
    return (*grads, None)


torch.library.register_autograd("midus::linear_topk", _gradients, setup_context=_save_for_backward)
refuse_gradient("midus::linear_topk_backward", "second derivative")

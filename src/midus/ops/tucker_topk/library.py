"""The Triton kernels as PyTorch operators: what compilers, autograd and graphs see of them."""

from typing import Any

import torch
from torch import Tensor

from midus.ops.gradients import refuse_gradient

_INPUTS = "Tensor row_queries, Tensor col_queries, Tensor row_keys, Tensor col_keys, Tensor cores"

# Besides slots and scores, what the backward pass needs of the winners' rows and columns.
torch.library.define(
    "midus::tucker_topk", f"({_INPUTS}, int top_k) -> (Tensor, Tensor, Tensor, Tensor)"
)
torch.library.define(
    "midus::tucker_topk_backward",
    f"(Tensor grad_scores, Tensor slot_idx, Tensor row_parts, Tensor col_parts, {_INPUTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


# Triton is imported at the first call: it is slow to import, and absent on some machines.
@torch.library.impl("midus::tucker_topk", ("cpu", "cuda"))
def _forward(*args: Any) -> tuple[Tensor, ...]:
    from midus.ops.tucker_topk.kernels import tucker_topk_forward

    return tucker_topk_forward(*args)


@torch.library.impl("midus::tucker_topk_backward", ("cpu", "cuda"))
def _backward(*args: Any) -> tuple[Tensor, ...]:
    from midus.ops.tucker_topk.kernels import tucker_topk_backward

    return tucker_topk_backward(*args)


@torch.library.register_fake("midus::tucker_topk")
def _fake_forward(
    row_queries: Tensor,
    col_queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    cores: Tensor,
    top_k: int,
) -> tuple[Tensor, ...]:
    shape = (*row_queries.shape[:-1], top_k)
    num_cores, rank = cores.shape[0], cores.shape[-1]
    return (
        row_queries.new_empty(shape, dtype=torch.int64),
        row_queries.new_empty((*shape, num_cores), dtype=torch.float32),
        row_queries.new_empty((*shape, rank), dtype=torch.float32),
        row_queries.new_empty((*shape, rank), dtype=torch.float32),
    )


@torch.library.register_fake("midus::tucker_topk_backward")
def _fake_backward(
    grad_scores: Tensor, slot_idx: Tensor, row_parts: Tensor, col_parts: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    slot_idx, _, row_parts, col_parts = output
    ctx.save_for_backward(slot_idx, row_parts, col_parts, *inputs[:5])
    ctx.mark_non_differentiable(slot_idx, row_parts, col_parts)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, _: None, grad_scores: Tensor | None, *parts: None) -> tuple[Any, ...]:
    if grad_scores is None:
        return (None,) * 6
    grads = torch.ops.midus.tucker_topk_backward(grad_scores, *ctx.saved_tensors)
    return (*grads, None)


torch.library.register_autograd("midus::tucker_topk", _gradients, setup_context=_save_for_backward)
refuse_gradient("midus::tucker_topk_backward", "second derivative")

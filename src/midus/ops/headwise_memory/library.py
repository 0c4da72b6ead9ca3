"""The Triton kernels as PyTorch operators: what compilers, autograd and graphs see of them."""

from typing import Any

import torch
from torch import Tensor

from midus.ops.gradients import refuse_gradient

_INPUTS = (
    "Tensor queries, Tensor row_keys, Tensor col_keys, Tensor latent_values, Tensor value_proj"
)

torch.library.define(
    "midus::headwise_memory",
    f"({_INPUTS}, int top_k, bool cartesian, bool save) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "midus::headwise_memory_backward",
    f"(Tensor grad_out, {_INPUTS}, Tensor slot_idx, Tensor weights, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "midus::headwise_memory_cached",
    "(Tensor queries, Tensor row_keys, Tensor col_keys, Tensor value_cache, int top_k,"
    " bool cartesian) -> Tensor",
)


# Triton is imported at the first call: it is slow to import, and absent on some machines.
def run_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from midus.ops.headwise_memory.forward_kernels import headwise_memory_forward

    return headwise_memory_forward(*args)


def run_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from midus.ops.headwise_memory.backward_kernels import headwise_memory_backward

    return headwise_memory_backward(*args)


def run_cached(*args: Any) -> Tensor:
    from midus.ops.headwise_memory.forward_kernels import headwise_memory_cached_forward

    return headwise_memory_cached_forward(*args)


torch.library.impl("midus::headwise_memory", ("cpu", "cuda"), run_forward)
torch.library.impl("midus::headwise_memory_backward", ("cpu", "cuda"), run_backward)
torch.library.impl("midus::headwise_memory_cached", ("cpu", "cuda"), run_cached)


@torch.library.register_fake("midus::headwise_memory")
def _fake_forward(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    latent_values: Tensor,
    value_proj: Tensor,
    top_k: int,
    cartesian: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    lines = queries.shape[:-1]
    saved = (*lines, top_k) if save else (0,)
    return (
        queries.new_empty((*lines, value_proj.shape[2]), dtype=value_proj.dtype),
        queries.new_empty(saved, dtype=torch.int32),
        queries.new_empty(saved, dtype=torch.float32),
    )


@torch.library.register_fake("midus::headwise_memory_backward")
def _fake_backward(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    needs = args[-1]
    is_made = (True, *[needs[1] or needs[2] or needs[4]] * 2, needs[3])
    is_made = (*is_made, is_made[1])
    return tuple(
        tensor.new_empty(tensor.shape if made else 0)
        for tensor, made in zip(args[:5], is_made, strict=True)
    )


@torch.library.register_fake("midus::headwise_memory_cached")
def _fake_cached(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    cartesian: bool,
) -> Tensor:
    shape = (*queries.shape[:-1], value_cache.shape[2])
    return queries.new_empty(shape, dtype=value_cache.dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Besides the inputs, which live anyway, only slot numbers and weights.
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 8
    needs = ctx.needs_input_grad[:5]
    grads = torch.ops.midus.headwise_memory_backward(grad_out, *ctx.saved_tensors, needs)
    return (*_wanted(grads, needs), None, None, None)


def _wanted(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


torch.library.register_autograd(
    "midus::headwise_memory", _gradients, setup_context=_save_for_backward
)
refuse_gradient("midus::headwise_memory_backward", "second derivative")
refuse_gradient("midus::headwise_memory_cached", "gradient")


class HeadwiseMemory(torch.autograd.Function):
    """The kernels and their gradient for plain tensors, past the dispatcher: less Python."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        out, *saved = run_forward(*args, True)
        ctx.save_for_backward(*args[:5], *saved)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[:5]
        return (*_wanted(run_backward(*grads, *ctx.saved_tensors, needs), needs), None, None)

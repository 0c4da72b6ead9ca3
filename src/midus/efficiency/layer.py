"""One head-wise memory layer: our kernels beside plain PyTorch, compiled PyTorch and the paper.

`midus bench layer` and `benchmarks/hml_layer.py` run it: check first, then time.

The variants compute the same layer on the same random inputs:

- naive: the layer as one writes it in PyTorch, scores in the inputs' own type (in bfloat16 it
  therefore picks some other slots than float32 arithmetic does);
- compiled: the same through ``torch.compile``;
- paper: the paper's recipe in PyTorch: two-stage Top-k, fused Cartesian Top-k for short queries
  and a value cache in inference, Algorithm 1 in training;
- ours: ``midus.ops.headwise_memory``; ours cached: with the value cache.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from midus.efficiency.timing import Timer, forward_backward
from midus.errors import MidusError
from midus.ops import headwise_memory, headwise_memory_cached

# Tokens up to which the recipe searches the whole grid: what decoding in small batches has.
_PAPER_SHORT = 16
# Past this relative error against float32 the kernels are not timed.
MAX_ERROR = 5e-3


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries, row keys, column keys, latent values, projections."""


class LayerShape(NamedTuple):
    """Sizes of one layer, in the names of the config."""

    num_heads: int
    head_dim: int
    head_width: int
    num_subkeys: int
    top_k: int
    latent_dim: int


def measure_layer(
    shape: LayerShape, tokens: list[int], dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Checks and times the layer for each number of tokens, one row at a time."""
    timer = Timer(device)
    bandwidth = timer.bandwidth()
    for num_tokens in tokens:
        yield _measure(shape, num_tokens, dtype, timer, bandwidth)


def _measure(
    shape: LayerShape, num_tokens: int, dtype: torch.dtype, timer: Timer, bandwidth: float
) -> dict[str, Any]:
    inputs = random_inputs(shape, num_tokens, dtype, timer.device)
    out_shape = (num_tokens, shape.num_heads, shape.head_width)
    grad = torch.randn(out_shape, device=timer.device).to(dtype)
    top_k = shape.top_k
    rel_error, is_repeatable = _check(inputs, grad, top_k)
    cache = torch.matmul(inputs[3], inputs[4]).contiguous()  # [H, N, O]
    torch.compiler.reset()  # or the compiler gives up on its own after a few sizes
    compiled = torch.compile(_naive, dynamic=False)
    moved = num_tokens * shape.num_heads * (shape.head_dim + shape.head_width) * grad.itemsize
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "rel_error": rel_error,
        "backward_repeatable": is_repeatable,
        "floor_fwd_ms": moved / bandwidth * 1e3,
    }
    forward: dict[str, Callable[[], Any]] = {
        "naive": lambda: _naive(*inputs, top_k),
        "compiled": lambda: compiled(*inputs, top_k),
        "paper": lambda: _paper_inference(*inputs[:3], cache, top_k),
        "ours": lambda: headwise_memory(*inputs, top_k),
        "ours_cached": lambda: headwise_memory_cached(*inputs[:3], cache, top_k),
    }
    with torch.no_grad():
        for name, run in forward.items():
            row[f"{name}_fwd_ms"] = timer.eager(run)
            if timer.has_graphs:
                row[f"{name}_fwd_graph_ms"] = timer.graph(run)
    training: dict[str, Callable[..., Tensor]] = {
        "naive": _naive,
        "compiled": compiled,
        "paper": _paper_training,
        "ours": headwise_memory,
    }
    for name, function in training.items():
        step = forward_backward(function, inputs, grad, top_k)
        row[f"{name}_fwdbwd_ms"] = timer.eager(step)
        # torch.unique, in the paper's, asks the device for a size: no graph can hold it.
        if timer.has_graphs and name != "paper":
            row[f"{name}_fwdbwd_graph_ms"] = timer.graph(step)
    return row


def random_inputs(
    shape: LayerShape, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Queries, keys and values of the scales a layer starts with, the table filled."""

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, device=device) * scale).to(dtype)

    half = shape.head_dim // 2
    heads, subkeys, latent = shape.num_heads, shape.num_subkeys, shape.latent_dim
    return (
        draw(num_tokens, heads, shape.head_dim),
        draw(heads, subkeys, half, scale=half**-0.5),
        draw(heads, subkeys, half, scale=half**-0.5),
        draw(subkeys**2, latent),
        draw(heads, latent, shape.head_width, scale=latent**-0.5),
    )


def _check(inputs: Inputs, grad: Tensor, top_k: int) -> tuple[float, bool]:
    """The largest relative error of output and gradients against float32; two equal backwards."""
    q, row_keys, col_keys, values, proj = (tensor.float() for tensor in inputs)
    wide = (q, row_keys, col_keys, values, proj)
    run = forward_backward(headwise_memory, inputs, grad, top_k)
    exact = forward_backward(headwise_memory, wide, grad.float(), top_k, "reference")
    with torch.no_grad():
        out = headwise_memory(*inputs, top_k)
        expected = headwise_memory(*wide, top_k, "reference")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(before)
    errors = [_error(a, b) for a, b in zip((out, *first), (expected, *exact()), strict=True)]
    worst = max(errors)
    if not worst <= MAX_ERROR:
        raise MidusError(
            f"the kernels are off by {worst:.1e} of float32; nothing is timed, please report it"
        )
    return worst, all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _error(actual: Tensor, expected: Tensor) -> float:
    distance = (actual.float() - expected).norm() / expected.norm()
    return float("inf") if distance.isnan() else distance.item()


def _naive(
    queries: Tensor, row_keys: Tensor, col_keys: Tensor, values: Tensor, proj: Tensor, top_k: int
) -> Tensor:
    slot_idx, weights = _two_stage(queries, row_keys, col_keys, top_k)
    latent = (weights.unsqueeze(-1) * F.embedding(slot_idx, values)).sum(dim=-2)
    return torch.einsum("thr,hro->tho", latent, proj)


def _paper_training(
    queries: Tensor, row_keys: Tensor, col_keys: Tensor, values: Tensor, proj: Tensor, top_k: int
) -> Tensor:
    slot_idx, weights = _two_stage(queries, row_keys, col_keys, top_k)
    bags = (slot_idx.flatten(0, 1), weights.flatten(0, 1))
    latent: Tensor = _DeduplicatedSum.apply(values, *bags)  # type: ignore[no-untyped-call]  # torch
    return torch.einsum("thr,hro->tho", latent.view(*queries.shape[:2], -1), proj)


def _paper_inference(
    queries: Tensor, row_keys: Tensor, col_keys: Tensor, value_cache: Tensor, top_k: int
) -> Tensor:
    search = _cartesian if queries.shape[0] <= _PAPER_SHORT else _two_stage
    slot_idx, weights = search(queries, row_keys, col_keys, top_k)
    num_heads, num_slots, _ = value_cache.shape
    own = torch.arange(num_heads, device=queries.device).unsqueeze(-1) * num_slots
    rows = F.embedding(slot_idx + own, value_cache.flatten(0, 1))
    return (weights.unsqueeze(-1) * rows).sum(dim=-2)


def _two_stage(
    queries: Tensor, row_keys: Tensor, col_keys: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    row_queries, col_queries = queries.chunk(2, dim=-1)
    row_best, row_idx = torch.einsum("the,hne->thn", row_queries, row_keys).topk(top_k, dim=-1)
    col_best, col_idx = torch.einsum("the,hne->thn", col_queries, col_keys).topk(top_k, dim=-1)
    pair_scores = (row_best.unsqueeze(-1) + col_best.unsqueeze(-2)).flatten(-2)
    candidates = (row_idx.unsqueeze(-1) * row_keys.shape[1] + col_idx.unsqueeze(-2)).flatten(-2)
    scores, winners = pair_scores.topk(top_k, dim=-1)
    return candidates.gather(-1, winners), scores.softmax(dim=-1)


def _cartesian(
    queries: Tensor, row_keys: Tensor, col_keys: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    row_queries, col_queries = queries.chunk(2, dim=-1)
    row_scores = torch.einsum("the,hne->thn", row_queries, row_keys)
    col_scores = torch.einsum("the,hne->thn", col_queries, col_keys)
    grid = (row_scores.unsqueeze(-1) + col_scores.unsqueeze(-2)).flatten(-2)
    scores, slot_idx = grid.topk(top_k, dim=-1)
    return slot_idx, scores.softmax(dim=-1)


class _DeduplicatedSum(torch.autograd.Function):
    """Weighted sum of rows with the paper's Algorithm 1 as its backward pass, in PyTorch."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, slot_idx: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(values, slot_idx, weights)
        return (weights.unsqueeze(-1) * F.embedding(slot_idx, values)).sum(dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor]:
        (grad_out,) = grads
        values, slot_idx, weights = ctx.saved_tensors
        expanded = (grad_out.unsqueeze(1) * weights.unsqueeze(-1)).flatten(0, 1)
        unique, inverse = slot_idx.flatten().unique(return_inverse=True)
        summed = expanded.new_zeros(unique.numel(), values.shape[1], dtype=torch.float32)
        summed.index_add_(0, inverse, expanded.float())
        grad_values = torch.zeros_like(values)
        grad_values[unique] = summed.to(values.dtype)
        grad_weights = (F.embedding(slot_idx, values) * grad_out.unsqueeze(1)).sum(dim=-1)
        return grad_values, None, grad_weights

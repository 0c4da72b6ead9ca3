"""Random head-wise memory layers of any shape, and the same layer with given slots in float64."""

from typing import NamedTuple

import torch
from torch import Tensor
from triton_on_cpu import DEVICE

from midus.ops.weighted_gather.reference import weighted_gather

# Relative error (norm of the difference over the norm) against float64 on the same inputs.
# float32: sums in another order. 16 bits: operands of products rounded once or twice on the way.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


class Shape(NamedTuple):
    tokens: int
    heads: int
    query: int
    subkeys: int
    top_k: int
    latent: int
    output: int


class Layer(NamedTuple):
    queries: Tensor
    row_keys: Tensor
    col_keys: Tensor
    latent_values: Tensor
    value_proj: Tensor

    def wide(self) -> "Layer":
        """Leaves in float64 that want gradients."""
        return Layer(*(tensor.detach().double().requires_grad_() for tensor in self))


def random_layer(shape: Shape, dtype=torch.float32, seed: int = 0, device=DEVICE) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size, scale=1.0):
        return (torch.randn(*size, generator=generator) * scale).to(device, dtype)

    half = shape.query // 2
    return Layer(
        draw(shape.tokens, shape.heads, shape.query),
        draw(shape.heads, shape.subkeys, half, scale=half**-0.5),
        draw(shape.heads, shape.subkeys, half, scale=half**-0.5),
        draw(shape.subkeys**2, shape.latent),
        draw(shape.heads, shape.latent, shape.output, scale=shape.latent**-0.5),
    )


def scores_of(layer: Layer, slot_idx: Tensor) -> Tensor:
    """The scores of given slots; differentiable."""
    num_subkeys = layer.row_keys.shape[1]
    row_queries, col_queries = layer.queries.chunk(2, dim=-1)
    rows = torch.einsum("the,hne->thn", row_queries, layer.row_keys)
    cols = torch.einsum("the,hne->thn", col_queries, layer.col_keys)
    slot_idx = slot_idx.long()
    return rows.gather(-1, slot_idx // num_subkeys) + cols.gather(-1, slot_idx % num_subkeys)


def with_slots(layer: Layer, slot_idx: Tensor) -> Tensor:
    """The layer's output if it had selected these slots: a choice of ties cannot matter."""
    weights = scores_of(layer, slot_idx).softmax(dim=-1)
    latent = weighted_gather(layer.latent_values, slot_idx.long(), weights)
    return torch.einsum("thr,hro->tho", latent, layer.value_proj)


def best_scores(layer: Layer, top_k: int) -> Tensor:
    """The largest of all n * n scores, best first."""
    row_queries, col_queries = layer.queries.chunk(2, dim=-1)
    rows = torch.einsum("the,hne->thn", row_queries, layer.row_keys)
    cols = torch.einsum("the,hne->thn", col_queries, layer.col_keys)
    return (rows.unsqueeze(-1) + cols.unsqueeze(-2)).flatten(-2).topk(top_k, dim=-1).values


def error(actual: Tensor, expected: Tensor) -> float:
    """NaN counts as infinite."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    norm = expected.norm()
    distance = (actual - expected).norm() / (norm if norm > 0 else 1.0)
    return torch.inf if distance.isnan() else distance.item()

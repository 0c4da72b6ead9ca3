"""From what the memory reads to its queries: a projection, a norm, or neither (HML).

The norms are the paper's structural ablation (Table "structure of HML"); the projection is W_q of
its preliminaries, which HML omits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midus.memory.module import MemoryModule


class QueryProj(MemoryModule):
    """q(a) = a W_q, square and without bias; the paper gives no start, so scale is kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, attended: Tensor) -> Tensor:
        return F.linear(attended, self.weight)


class QueryBatchNorm(nn.Module):
    """BatchNorm1d over all heads' queries, statistics over every token of the batch.

    As in Lample et al. (2019). Padding tokens count in the statistics while training.
    """

    def __init__(self, num_heads: int, query_dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(num_heads * query_dim)

    def forward(self, queries: Tensor) -> Tensor:
        flat: Tensor = self.norm(queries.flatten(-2).flatten(0, -2))  # [B * T, H * E]
        return flat.view(queries.shape)


def make_query_norm(kind: str, num_heads: int, query_dim: int) -> nn.Module:
    """The norm of that name: ``none``, ``batch``, or ``layer`` (over each head's own query)."""
    if kind == "batch":
        return QueryBatchNorm(num_heads, query_dim)
    return nn.LayerNorm(query_dim) if kind == "layer" else nn.Identity()

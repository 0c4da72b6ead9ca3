"""A linear map from attention to the output, beside the memory (beyond the paper)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midus.memory.module import MemoryModule


class AttentionBypass(MemoryModule):
    """What attention found, written without retrieval; at the start it writes nothing.

    Args:
        attended_dim: Width of what attention returns, all heads together.
        hidden_size: Width of the residual stream.
    """

    def __init__(self, attended_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, attended_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, attended: Tensor) -> Tensor:
        return F.linear(attended, self.weight)

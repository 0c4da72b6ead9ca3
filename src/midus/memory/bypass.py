"""A linear map to the output, beside the memory (beyond the paper)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midus.memory.module import MemoryModule


class Bypass(MemoryModule):
    """What attention found or reads, written without retrieval; at the start it writes nothing.

    Args:
        read_dim: Width of what it reads.
        hidden_size: Width of the residual stream.
    """

    def __init__(self, read_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, read_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, read: Tensor) -> Tensor:
        return F.linear(read, self.weight)

"""A linear map to the output, beside the memory (beyond the paper)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midus.memory.module import MemoryModule


class Bypass(MemoryModule):
    """What attention found or reads, written without retrieval; at the start it writes nothing.

    Args:
        read_dims: Widths of what it reads; its matrix has their columns side by side.
        hidden_size: Width of the residual stream.
    """

    def __init__(self, read_dims: tuple[int, ...], hidden_size: int) -> None:
        super().__init__()
        self.read_dims = read_dims
        self.weight = nn.Parameter(torch.empty(hidden_size, sum(read_dims)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, *read: Tensor) -> Tensor:
        if len(read) == 1:
            return F.linear(read[0], self.weight)
        first, second = self.weight.split(self.read_dims, dim=1)
        return F.linear(read[0], first) + F.linear(read[1], second)

"""A linear map after the memory that starts as the identity (beyond the paper)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midus.memory.module import MemoryModule


class MemoryOutputProj(MemoryModule):
    """Mixes the heads' corrections; at the start it changes nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)

    def forward(self, correction: Tensor) -> Tensor:
        return F.linear(correction, self.weight)

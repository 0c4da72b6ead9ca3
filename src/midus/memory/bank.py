"""A bank of full-width values that all heads share and whose readings are summed.

Paper, Section 4.2: ``M_h = sum alpha V``, ``m = sum_h M_h`` with V in R^{N x d}.
"""

import torch
from torch import Tensor, nn

from midus.memory.module import MemoryModule
from midus.ops import weighted_gather


class SummedValues(MemoryModule):
    """``[N, D]`` values; the heads' weighted readings add up. Starts at zero."""

    def __init__(self, num_slots: int, hidden_size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(num_slots, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.values)

    def forward(self, slot_idx: Tensor, weights: Tensor) -> Tensor:
        # All heads' slots of a token form one bag.
        return weighted_gather(self.values, slot_idx.flatten(-2), weights.flatten(-2))  # [B, T, D]

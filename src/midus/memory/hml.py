"""The Head-wise Memory Layer (HML): product keys and HIVE values, one memory head a head.

Paper, Section 4.2, "Head-wise Memory Layer". A head's attention output is its query; its
retrieved latent value, projected by its own W_h, is its slice of the correction.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from midus.errors import MidusError
from midus.memory.base import MemoryLayer
from midus.memory.hive import HiveValues, IndependentValues, SharedValues
from midus.memory.keys import ProductKeys

if TYPE_CHECKING:
    from midus.config import MemoryConfig


class HeadwiseMemory(MemoryLayer):
    """HML(a'): every head queries its own keys and reads the table all heads share."""

    def __init__(
        self, config: "MemoryConfig", hidden_size: int, num_heads: int, attended_dim: int
    ) -> None:
        super().__init__(config, hidden_size, num_heads, attended_dim)
        if hidden_size % num_heads:
            raise MidusError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}; "
                "the head-wise memory layer gives every head an equal slice of the output"
            )
        self.require_even_queries()
        self.num_slots = config.num_subkeys**2
        self.keys = ProductKeys(
            num_heads, config.num_subkeys, self.query_dim, config.top_k, config.key_init
        )
        head_width = hidden_size // num_heads
        self.values: HiveValues | SharedValues | IndependentValues
        if config.values == "hive":
            self.values = HiveValues(
                self.num_slots, num_heads, head_width, config.latent_dim, config.value_proj_init
            )
        elif config.values == "shared":
            self.values = SharedValues(self.num_slots, head_width)
        else:
            self.values = IndependentValues(self.num_slots, num_heads, head_width)

    def forward(self, attended: Tensor) -> Tensor:
        slot_idx, weights = self.keys(self.make_queries(attended))  # [B, T, H, K] each
        head_values: Tensor = self.values(slot_idx, weights)  # [B, T, H, O]
        return head_values.flatten(-2)  # [B, T, D]

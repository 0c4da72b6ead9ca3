"""The Head-wise Memory Layer (HML): product keys and HIVE values, one memory head a head.

Paper, Section 4.2, "Head-wise Memory Layer". A head's attention output is its query; its
retrieved latent value, projected by its own W_h, is its slice of the correction.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from midus.errors import MidusError
from midus.memory.base import MemoryLayer
from midus.memory.hive import HiveValues
from midus.memory.keys import ProductKeys
from midus.memory.query_norm import make_query_norm

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
        self.query_dim = attended_dim // num_heads
        if self.query_dim % 2:
            raise MidusError(
                f"head_dim={self.query_dim} is odd; product keys split each head's query into a "
                "row half and a column half, so use a base with an even head_dim"
            )
        self.query_norm = make_query_norm(config.query_norm, num_heads, self.query_dim)
        self.keys = ProductKeys(
            num_heads, config.num_subkeys, self.query_dim, config.top_k, config.key_init
        )
        self.values = HiveValues(
            config.num_slots,
            num_heads,
            hidden_size // num_heads,
            config.latent_dim,
            config.value_proj_init,
        )

    def forward(self, attended: Tensor) -> Tensor:
        queries = attended.unflatten(-1, (self.num_heads, self.query_dim))  # [B, T, H, E]
        slot_idx, weights = self.keys(self.query_norm(queries))  # [B, T, H, K] each
        head_values: Tensor = self.values(slot_idx, weights)  # [B, T, H, O]
        return head_values.flatten(-2)  # [B, T, D]

"""The Head-wise Memory Layer (HML): product keys and HIVE values, one memory head a head.

Paper, Section 4.2, "Head-wise Memory Layer". A head's attention output is its query; its
retrieved latent value, projected by its own W_h, is its slice of the correction.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.memory.base import MemoryLayer
from midus.memory.hive import HiveValues, IndependentValues, SharedValues
from midus.memory.keys import ProductKeys
from midus.ops import headwise_memory, headwise_memory_cached

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
            num_heads,
            config.num_subkeys,
            self.query_dim,
            config.top_k,
            config.key_init,
            config.key_scale,
        )
        head_width = hidden_size // num_heads
        self.values: HiveValues | SharedValues | IndependentValues
        if config.values == "hive":
            self.values = HiveValues(
                self.num_slots,
                num_heads,
                head_width,
                config.latent_dim,
                config.value_proj_init,
                config.value_proj_scale,
            )
        elif config.values == "shared":
            self.values = SharedValues(self.num_slots, head_width)
        else:
            self.values = IndependentValues(self.num_slots, num_heads, head_width)

    def forward(self, attended: Tensor) -> Tensor:
        queries = self.make_queries(attended)  # [B, T, H, E]
        head_values: Tensor  # [B, T, H, O]
        values = self.values
        if isinstance(values, HiveValues) and self._holds_its_tables():
            head_values = self._hive(queries, values)
        else:
            head_values = values(*self.keys(queries))
        return head_values.flatten(-2)  # [B, T, D]

    def _holds_its_tables(self) -> bool:
        """Whether keys and values are there to be read without calling their modules.

        Adapters put modules of their own in place, parametrizations another class, and offloaded
        weights are fetched by the call.
        """
        keys, values = self.keys, self.values
        return (
            type(keys) is ProductKeys
            and type(values) is HiveValues
            and not (keys.row_keys.is_meta or values.latent_values.is_meta)
        )

    def _hive(self, queries: Tensor, values: HiveValues) -> Tensor:
        """Retrieval and Eq. 5 as one operation, from the cache where there is one."""
        keys = self.keys
        cache = None
        # The cache has no gradient, and autocast would have projected in another type.
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(queries.device.type):
            cache = values.fresh_cache()
        if cache is not None:
            return headwise_memory_cached(queries, keys.row_keys, keys.col_keys, cache, keys.top_k)
        return headwise_memory(
            queries,
            keys.row_keys,
            keys.col_keys,
            values.latent_values,
            values.value_proj,
            keys.top_k,
        )

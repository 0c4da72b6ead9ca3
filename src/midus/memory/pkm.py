"""Product-key memory (Lample et al., 2019) as the paper's comparison has it.

Queries from a projection of a(x), distinct product keys per head, one full-width bank of values
shared by the heads, whose readings are summed (paper, Section 4.2 before HIVE).
"""

from typing import TYPE_CHECKING

from torch import Tensor

from midus.memory.bank import SummedValues
from midus.memory.base import MemoryLayer
from midus.memory.keys import ProductKeys

if TYPE_CHECKING:
    from midus.config import MemoryConfig


class ProductKeyMemory(MemoryLayer):
    """Product keys of every head over one shared bank."""

    def __init__(
        self, config: "MemoryConfig", hidden_size: int, num_heads: int, attended_dim: int
    ) -> None:
        super().__init__(config, hidden_size, num_heads, attended_dim)
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
        self.values = SummedValues(self.num_slots, hidden_size)

    def forward(self, attended: Tensor) -> Tensor:
        return self.values(*self.keys(self.make_queries(attended)))  # type: ignore[no-any-return]

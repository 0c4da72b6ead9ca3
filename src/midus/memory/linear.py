"""Linear memory: one key per slot and head, exhaustive search (paper, Section 3).

The same number of slots as product keys would address, num_subkeys squared, with the keys and the
lookup cost that product keys save.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from midus.memory.bank import SummedValues
from midus.memory.base import MemoryLayer
from midus.memory.keys import LinearKeys

if TYPE_CHECKING:
    from midus.config import MemoryConfig


class LinearMemory(MemoryLayer):
    """Full keys of every head over one shared bank."""

    def __init__(
        self, config: "MemoryConfig", hidden_size: int, num_heads: int, attended_dim: int
    ) -> None:
        super().__init__(config, hidden_size, num_heads, attended_dim)
        self.num_slots = config.num_subkeys**2
        self.keys = LinearKeys(
            num_heads,
            self.num_slots,
            self.query_dim,
            config.top_k,
            config.key_init,
            config.key_scale,
        )
        self.values = SummedValues(self.num_slots, hidden_size)

    def forward(self, attended: Tensor) -> Tensor:
        return self.values(*self.keys(self.make_queries(attended)))  # type: ignore[no-any-return]

"""What every memory layer is: attended tokens in, a correction of the residual stream out."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from midus.errors import MidusError
from midus.memory.queries import QueryProj, make_query_norm

if TYPE_CHECKING:
    from midus.config import MemoryConfig


_VALUES = frozenset({"latent_values", "values"})
# What the paper trains at a constant rate; projections of queries and values are not among them.
_KEYS_AND_VALUES = _VALUES | {"row_keys", "col_keys", "keys"}


class MemoryLayer(nn.Module):
    """Mem(.): ``[B, T, attended_dim] -> [B, T, hidden_size]``, zero before training.

    Args:
        config: Options of the memory layer.
        hidden_size: Width of the residual stream (paper: d).
        num_heads: Query heads of the base's attention (paper: H); each has keys of its own.
        attended_dim: Width of the attention output that the layer reads.
    """

    num_slots: int
    """Slots one head can address; set by each layer."""

    def __init__(
        self, config: "MemoryConfig", hidden_size: int, num_heads: int, attended_dim: int
    ) -> None:
        super().__init__()
        if attended_dim % num_heads:
            raise MidusError(
                f"hidden_size={attended_dim} is not divisible by num_heads={num_heads}; "
                "a memory layer gives every head an equal slice of what it reads"
            )
        self.num_heads = num_heads
        self.query_dim = attended_dim // num_heads
        self.query_proj = QueryProj(attended_dim) if config.query_proj else nn.Identity()
        self.query_norm = make_query_norm(config.query_norm, num_heads, self.query_dim)

    def make_queries(self, attended: Tensor) -> Tensor:
        """One query per head: ``[B, T, H, E]``."""
        queries: Tensor = self.query_proj(attended)
        queries = queries.unflatten(-1, (self.num_heads, self.query_dim))
        return self.query_norm(queries)  # type: ignore[no-any-return]  # a module's call

    def keys_and_values(self) -> Iterator[nn.Parameter]:
        """The tables: every parameter a slot owns a row of."""
        return self._called(_KEYS_AND_VALUES)

    def value_tables(self) -> Iterator[nn.Parameter]:
        """The tables that are read: the layer's output is linear in them."""
        return self._called(_VALUES)

    def _called(self, names: frozenset[str]) -> Iterator[nn.Parameter]:
        for name, parameter in self.named_parameters():
            if name.rpartition(".")[2] in names:
                yield parameter

    def require_even_queries(self) -> None:
        """Product keys split each query into a row half and a column half."""
        if self.query_dim % 2:
            raise MidusError(
                f"head_dim={self.query_dim} is odd; product keys split each head's query into a "
                "row half and a column half, so use a base with an even head_dim"
            )

    def forward(self, attended: Tensor) -> Tensor:
        raise NotImplementedError

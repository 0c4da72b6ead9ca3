"""Keys: how a query finds its slots. Every head has keys of its own.

Paper, Section 4.2, "Multi-head product-key memory", and the linear memory of its preliminaries.
"""

import torch
from torch import Tensor, nn

from midus.memory.module import MemoryModule
from midus.ops import linear_topk, product_key_topk


def _reset(keys: nn.Parameter, init: str, scale: float) -> None:
    """Uniform in ±1/sqrt(width) or normal with that std; the paper gives no start for keys."""
    scale *= keys.shape[-1] ** -0.5
    if init == "uniform":
        nn.init.uniform_(keys, -scale, scale)
    else:
        nn.init.normal_(keys, std=scale)


class ProductKeys(MemoryModule):
    """n row and n column sub-keys per head, whose pairs address N = n * n slots.

    Args:
        num_heads: Heads with a key space of their own (paper: H).
        num_subkeys: Row and column sub-keys per head (paper: n).
        query_dim: Width of one head's query; even, one half for rows and one for columns.
        top_k: Slots retrieved per head and token (paper: k).
        init: ``uniform`` or ``normal``.
        scale: What the start is multiplied by.
    """

    def __init__(
        self,
        num_heads: int,
        num_subkeys: int,
        query_dim: int,
        top_k: int,
        init: str = "uniform",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.init = init
        self.scale = scale
        self.row_keys = nn.Parameter(torch.empty(num_heads, num_subkeys, query_dim // 2))
        self.col_keys = nn.Parameter(torch.empty(num_heads, num_subkeys, query_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self.row_keys, self.init, self.scale)
        _reset(self.col_keys, self.init, self.scale)

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        slot_idx, scores = product_key_topk(queries, self.row_keys, self.col_keys, self.top_k)
        return slot_idx, scores.softmax(dim=-1)  # both [B, T, H, K]


class LinearKeys(MemoryModule):
    """One key per slot and head.

    Args:
        num_heads: Heads with a key space of their own (paper: H).
        num_slots: Slots per head (paper: N).
        query_dim: Width of one head's query.
        top_k: Slots retrieved per head and token (paper: k).
        init: ``uniform`` or ``normal``.
        scale: What the start is multiplied by.
    """

    def __init__(
        self,
        num_heads: int,
        num_slots: int,
        query_dim: int,
        top_k: int,
        init: str = "uniform",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.init = init
        self.scale = scale
        self.keys = nn.Parameter(torch.empty(num_heads, num_slots, query_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self.keys, self.init, self.scale)

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        slot_idx, scores = linear_topk(queries, self.keys, self.top_k)
        return slot_idx, scores.softmax(dim=-1)  # both [B, T, H, K]

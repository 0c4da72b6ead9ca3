"""Product keys: how a query finds its slots.

Paper, Section 4.2, "Multi-head product-key memory". Each head has n row and n column sub-keys
whose Cartesian product addresses N = n * n slots.
"""

import torch
from torch import Tensor, nn

from midus.memory.base import MemoryModule
from midus.ops import product_key_topk


class ProductKeys(MemoryModule):
    """Turns queries into slot numbers and weights, with distinct keys for every head.

    Args:
        num_heads: Heads with a key space of their own (paper: H).
        num_subkeys: Row and column sub-keys per head (paper: n).
        query_dim: Width of one head's query; even, one half for rows and one for columns.
        top_k: Slots retrieved per head and token (paper: k).
        init: ``uniform`` or ``normal``; the paper gives no start for keys.
    """

    def __init__(
        self, num_heads: int, num_subkeys: int, query_dim: int, top_k: int, init: str = "uniform"
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.init = init
        self.row_keys = nn.Parameter(torch.empty(num_heads, num_subkeys, query_dim // 2))
        self.col_keys = nn.Parameter(torch.empty(num_heads, num_subkeys, query_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        scale = self.row_keys.shape[-1] ** -0.5
        for keys in (self.row_keys, self.col_keys):
            if self.init == "uniform":
                nn.init.uniform_(keys, -scale, scale)
            else:
                nn.init.normal_(keys, std=scale)

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        slot_idx, scores = product_key_topk(queries, self.row_keys, self.col_keys, self.top_k)
        return slot_idx, scores.softmax(dim=-1)  # both [B, T, H, K]

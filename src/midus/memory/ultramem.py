"""UltraMem (Huang et al., 2024) as the paper's comparison has it.

Tucker-decomposed scores with rank-1 routing and two cores; implicit value expansion: the keys
address four virtual tables, which are one physical table seen through four projections; raw scores
as weights, no softmax. Sizes follow the parameter counts of the paper's efficiency table: rank 2,
2n sub-keys a side, values a quarter as wide as the model.

Shape letters besides the usual: E expansion, C cores, r rank, W value width.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midus.errors import MidusError
from midus.memory.base import MemoryLayer
from midus.memory.module import MemoryModule
from midus.ops import tucker_topk, weighted_gather

if TYPE_CHECKING:
    from midus.config import MemoryConfig

EXPANSION = 4
SIDE_EXPANSION = 2  # per side of the grid: its square is EXPANSION
NUM_CORES = 2
RANK = 2


def _fixed_norm(tensor: Tensor, dim: int) -> Tensor:
    """LayerNorm over ``dim`` with the fixed scale the reference starts from, width^-0.33.

    In float32 or wider, like the scores that follow.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    with torch.autocast(tensor.device.type, enabled=False):
        tensor = tensor.movedim(dim, -1).to(dtype)
        normed: Tensor = F.layer_norm(tensor, tensor.shape[-1:]) * tensor.shape[-1] ** -0.33
    return normed.movedim(-1, dim)


class TuckerKeys(MemoryModule):
    """Row and column keys of rank r per head, and the cores that combine their scores."""

    def __init__(self, num_heads: int, num_subkeys: int, query_dim: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        shape = (num_heads, SIDE_EXPANSION * num_subkeys, query_dim // 2, RANK)
        self.row_keys = nn.Parameter(torch.empty(shape))
        self.col_keys = nn.Parameter(torch.empty(shape))
        self.cores = nn.Parameter(torch.empty(NUM_CORES, num_heads, RANK, RANK))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for keys in (self.row_keys, self.col_keys):
            nn.init.normal_(keys, std=keys.shape[2] ** -0.5)
        nn.init.uniform_(self.cores, 0.0, 1.0)

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        row_queries, col_queries = queries.chunk(2, dim=-1)
        return tucker_topk(
            _fixed_norm(row_queries, -1),
            _fixed_norm(col_queries, -1),
            _fixed_norm(self.row_keys, 2),
            _fixed_norm(self.col_keys, 2),
            self.cores,
            self.top_k,
        )  # [B, T, H, K] and [B, T, H, K, C]


class ExpandedValues(MemoryModule):
    """One physical table behind E virtual ones, each with its part of the output projection.

    The table starts at zero and the projection does not, so the layer starts silent and can learn.
    A fixed permutation says which virtual slot is which physical row under which projection.
    """

    permutation: Tensor

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        super().__init__()
        if hidden_size % (EXPANSION * NUM_CORES):
            raise MidusError(
                f"hidden_size={hidden_size} is not divisible by {EXPANSION * NUM_CORES}; UltraMem "
                f"cuts it into {EXPANSION} value widths of {NUM_CORES} slices"
            )
        self.values = nn.Parameter(torch.empty(num_rows, hidden_size // EXPANSION))
        self.value_proj = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.register_buffer("permutation", torch.empty(EXPANSION * num_rows, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.values)
        nn.init.normal_(self.value_proj, std=self.value_proj.shape[1] ** -0.5)
        buffer = self.permutation
        if not buffer.is_meta and not getattr(buffer, "_is_hf_initialized", False):
            generator = torch.Generator().manual_seed(0)
            buffer.copy_(torch.randperm(buffer.numel(), generator=generator))

    def forward(self, slot_idx: Tensor, scores: Tensor) -> Tensor:
        num_rows, width = self.values.shape
        virtual = F.embedding(slot_idx.flatten(-2), self.permutation.unsqueeze(-1)).squeeze(-1)
        rows, groups = virtual % num_rows, virtual // num_rows  # [B, T, P], P = H * K
        # Each entry's row, its slice for each core weighted by that core's score; then the entries
        # of each virtual table are added up.
        slices = rows.unsqueeze(-1) * NUM_CORES + torch.arange(NUM_CORES, device=rows.device)
        weighted = weighted_gather(
            self.values.view(num_rows * NUM_CORES, width // NUM_CORES),
            slices.unsqueeze(-1),
            scores.flatten(-3, -2).unsqueeze(-1),
        )  # [B, T, P, C, W / C]
        tables = torch.arange(EXPANSION, device=groups.device)
        member = (groups.unsqueeze(-1) == tables).to(weighted.dtype)  # [B, T, P, E]
        expanded = torch.einsum("...pe,...pcw->...ecw", member, weighted)
        return F.linear(expanded.flatten(-3), self.value_proj)  # [B, T, D]


class UltraMemory(MemoryLayer):
    """Tucker keys of every head over one expanded table; the heads' readings are summed."""

    def __init__(
        self, config: "MemoryConfig", hidden_size: int, num_heads: int, attended_dim: int
    ) -> None:
        super().__init__(config, hidden_size, num_heads, attended_dim)
        self.require_even_queries()
        num_rows = config.num_subkeys**2
        self.num_slots = EXPANSION * num_rows
        self.keys = TuckerKeys(num_heads, config.num_subkeys, self.query_dim, config.top_k)
        self.values = ExpandedValues(num_rows, hidden_size)

    def forward(self, attended: Tensor) -> Tensor:
        return self.values(*self.keys(self.make_queries(attended)))  # type: ignore[no-any-return]

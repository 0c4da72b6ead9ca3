"""Head-wise Implicit Value Expansion (HIVE): one latent table, one projection per head.

Paper, "Head-wise Implicit Value Expansion", Eq. 5. Plain head-wise values would store
H * N * head_width numbers; HIVE stores N * latent_dim + H * latent_dim * head_width.
"""

import torch
from torch import Tensor, nn

from midus.memory.module import MemoryModule
from midus.ops import weighted_gather


class HiveValues(MemoryModule):
    """Turns retrieved slots into one vector per head.

    The latent table starts at zero, so a freshly inserted memory block is the identity. The
    projections must not: with both at zero neither would ever receive a gradient.

    Args:
        num_slots: Addressable slots per head, ``num_subkeys ** 2`` (paper: N).
        num_heads: Heads that read the shared table (paper: H).
        head_width: Width one head writes, ``hidden_size // num_heads`` (paper: d_h).
        latent_dim: Width of the shared table (paper: r). Default: ``head_width``.
        init: Start of the projections, ``normal`` (std r^-0.5) or ``identity``.
    """

    def __init__(
        self,
        num_slots: int,
        num_heads: int,
        head_width: int,
        latent_dim: int | None = None,
        init: str = "normal",
    ) -> None:
        super().__init__()
        latent_dim = head_width if latent_dim is None else latent_dim
        self.init = init
        self.latent_values = nn.Parameter(torch.empty(num_slots, latent_dim))
        self.value_proj = nn.Parameter(torch.empty(num_heads, latent_dim, head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.latent_values)
        if self.init == "normal":
            nn.init.normal_(self.value_proj, std=self.value_proj.shape[1] ** -0.5)
        elif not getattr(self.value_proj, "_is_hf_initialized", False):
            # nn.init.eye_ takes one matrix; the flag it would look at belongs to the whole tensor.
            for projection in self.value_proj.unbind(0):
                nn.init.eye_(projection)

    def forward(self, slot_idx: Tensor, weights: Tensor) -> Tensor:
        latent = weighted_gather(self.latent_values, slot_idx, weights)  # [B, T, H, R]
        # Project after the weighted sum: one R x O product per head instead of K of them.
        return torch.einsum("...hr,hro->...ho", latent, self.value_proj)  # [B, T, H, O]


class SharedValues(MemoryModule):
    """One realized bank for all heads: the paper's shared family (Section 4.3, V_sh)."""

    def __init__(self, num_slots: int, head_width: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(num_slots, head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.values)

    def forward(self, slot_idx: Tensor, weights: Tensor) -> Tensor:
        return weighted_gather(self.values, slot_idx, weights)  # [B, T, H, O]


class IndependentValues(MemoryModule):
    """A realized bank for each head: the paper's head-specific family (Section 4.3, V_h)."""

    def __init__(self, num_slots: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(num_heads, num_slots, head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.values)

    def forward(self, slot_idx: Tensor, weights: Tensor) -> Tensor:
        num_heads, num_slots, _ = self.values.shape
        own = torch.arange(num_heads, device=slot_idx.device).unsqueeze(-1) * num_slots
        return weighted_gather(self.values.flatten(0, 1), slot_idx + own, weights)  # [B, T, H, O]

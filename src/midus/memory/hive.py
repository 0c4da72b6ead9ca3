"""Head-wise Implicit Value Expansion (HIVE): one latent table, one projection per head.

Paper, "Head-wise Implicit Value Expansion", Eq. 5. Plain head-wise values would store
H * N * head_width numbers; HIVE stores N * latent_dim + H * latent_dim * head_width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from midus.memory.module import MemoryModule
from midus.ops import weighted_gather


class HiveValues(MemoryModule):
    """The latent table and the projections; `ops.headwise_memory` reads them (Eq. 5).

    Called as a module it computes the same from slots that were chosen before, which is what
    adapters and offloading need.

    The latent table starts at zero, so a freshly inserted memory block is the identity. The
    projections must not: with both at zero neither would ever receive a gradient.

    For inference the projected tables of all heads can be kept (paper, Appendix "Head-wise Value
    Caching"): ``build_cache`` makes them. They are no parameter and no buffer, so they are never
    saved, and they are dropped by ``train()``, by loading a state, by a move to another device or
    type, and as soon as a weight they were made from has changed in a way PyTorch counts.

    Args:
        num_slots: Addressable slots per head, ``num_subkeys ** 2`` (paper: N).
        num_heads: Heads that read the shared table (paper: H).
        head_width: Width one head writes, ``hidden_size // num_heads`` (paper: d_h).
        latent_dim: Width of the shared table (paper: r). Default: ``head_width``.
        init: Start of the projections, ``normal`` (std r^-0.5) or ``identity``.
        scale: What that start is multiplied by.
    """

    def __init__(
        self,
        num_slots: int,
        num_heads: int,
        head_width: int,
        latent_dim: int | None = None,
        init: str = "normal",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        latent_dim = head_width if latent_dim is None else latent_dim
        self.init = init
        self.scale = scale
        self.latent_values = nn.Parameter(torch.empty(num_slots, latent_dim))
        self.value_proj = nn.Parameter(torch.empty(num_heads, latent_dim, head_width))
        self.value_cache: Tensor | None = None
        # What it was made from: weight, its memory (held, so that the address stays its own), and
        # how often it had been written.
        self._cache_source: tuple[tuple[Tensor, Tensor, int], ...] = ()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.latent_values)
        if self.init == "normal":
            nn.init.normal_(self.value_proj, std=self.scale * self.value_proj.shape[1] ** -0.5)
        elif not getattr(self.value_proj, "_is_hf_initialized", False):
            # nn.init.eye_ takes one matrix; the flag it would look at belongs to the whole tensor.
            for projection in self.value_proj.unbind(0):
                nn.init.eye_(projection)
            if self.scale != 1.0:
                with torch.no_grad():
                    self.value_proj.mul_(self.scale)

    def forward(self, slot_idx: Tensor, weights: Tensor) -> Tensor:
        latent = weighted_gather(self.latent_values, slot_idx, weights)  # [B, T, H, R]
        return torch.einsum("...hr,hro->...ho", latent, self.value_proj)  # [B, T, H, O]

    def build_cache(self) -> None:
        """Projects the whole table for every head, ``[H, N, O]``, into the weights' own type.

        Nothing is built where changes of the weights could not be seen: from inference tensors,
        and from weights that are elsewhere (offloaded, sharded).
        """
        weights = (self.latent_values, self.value_proj)
        if any(w.is_inference() or w.is_meta or not w.numel() or _is_sharded(w) for w in weights):
            self.drop_cache()
            return
        table, projections = (weight.detach() for weight in weights)
        with torch.no_grad(), torch.autocast(table.device.type, enabled=False):
            if self.value_cache is None:
                self.value_cache = torch.matmul(table, projections)  # [H, N, O]
            else:  # where compiled code and CUDA graphs know it
                self.value_cache.copy_(torch.matmul(table, projections))
        self._cache_source = tuple((w, w.detach(), w._version) for w in weights)

    def drop_cache(self) -> None:
        """Frees the projected tables."""
        self.value_cache, self._cache_source = None, ()

    def fresh_cache(self) -> Tensor | None:
        """The projected tables, if there are any and they are still right."""
        # A compiler sees one state of the weights; whoever compiles builds the cache before.
        if self.value_cache is None or torch.compiler.is_compiling():
            return self.value_cache
        own = self._parameters  # asked every token, and `__getattr__` is slow
        table, projections = self._cache_source
        if own.get("latent_values") is not table[0] or own.get("value_proj") is not projections[0]:
            return None  # borrowed weights, as functional_call has them
        for weight, memory, version in self._cache_source:
            if weight._version != version or weight.data_ptr() != memory.data_ptr():
                self.drop_cache()
                break
        return self.value_cache

    def train(self, mode: bool = True) -> "HiveValues":
        if mode:
            self.drop_cache()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.drop_cache()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's own

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.drop_cache()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles of the module start without one.
        return {**self.__dict__, "value_cache": None, "_cache_source": ()}


def _is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "device_mesh")  # a DTensor


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

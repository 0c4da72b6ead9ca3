"""How much of its memory a model uses: slots chosen, and how evenly, for each inserted block."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from midus.memory.base import MemoryLayer

_LAYER = re.compile(r"layers\.(\d+)\.memory$")


@dataclass(frozen=True)
class SlotUsage:
    """Of one inserted block, over the tokens that were read."""

    used: float
    """Share of the (head, slot) pairs chosen at least once."""
    entropy: float
    """Entropy of the choices, averaged over heads, as a share of the largest, log(slots)."""


class SlotCounter:
    """Counts the slots one memory layer chooses, for so many tokens."""

    def __init__(self, layer: MemoryLayer, max_tokens: int) -> None:
        device = next(layer.parameters()).device
        self._counts = torch.zeros(layer.num_heads, layer.num_slots, device=device)
        self._left = max_tokens

    @torch.no_grad()
    def __call__(self, layer: Any, args: tuple[Any, ...]) -> None:
        attended: Tensor = args[0]  # [B, T, D]
        if self._left <= 0:
            return
        self._left -= attended.shape[:-1].numel()
        slot_idx, _ = layer.keys(layer.make_queries(attended))  # [B, T, H, K]
        slots = slot_idx.flatten(0, -3).transpose(0, 1).flatten(1).long()  # [H, B * T * K]
        self._counts.scatter_add_(1, slots, torch.ones_like(slots, dtype=self._counts.dtype))

    def usage(self) -> SlotUsage:
        """What the counts so far come to."""
        counts = self._counts
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        entropy = -torch.special.xlogy(shares, shares).sum(1).mean().item()
        return SlotUsage(
            used=(counts > 0).float().mean().item(), entropy=entropy / math.log(counts.shape[1])
        )


@contextmanager
def counting_slots(model: nn.Module, max_tokens: int) -> Iterator[dict[int, SlotCounter]]:
    """Counters by layer index, fed by whatever runs the model inside; empty without memory.

    Args:
        model: A model in evaluation mode.
        max_tokens: How many tokens count; the search for their slots is made a second time.
    """
    counters, hooks = {}, []
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        if match and isinstance(module, MemoryLayer):
            counter = SlotCounter(module, max_tokens)
            counters[int(match[1])] = counter
            hooks.append(module.register_forward_pre_hook(counter))
    try:
        yield counters
    finally:
        for hook in hooks:
            hook.remove()

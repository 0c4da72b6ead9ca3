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
    weighted_entropy: float
    """The same with every choice counted by its weight."""


def read_slots(layer: Any, attended: Tensor) -> tuple[Tensor, Tensor]:
    """The slots a memory layer chooses and how strongly it reads each, both ``[P, H, K]``.

    Args:
        layer: A memory layer in evaluation mode.
        attended: What it reads, ``[B, T, attended_dim]``; P = B * T.
    """
    slot_idx, weights = layer.keys(layer.make_queries(attended))
    if weights.dim() > slot_idx.dim():  # UltraMem: one raw score a core, of either sign
        weights = weights.abs().mean(-1)
    return slot_idx.flatten(0, -3).long(), weights.flatten(0, -3)


class SlotCounter:
    """Counts the slots one memory layer chooses, for so many tokens."""

    def __init__(self, layer: MemoryLayer, max_tokens: int) -> None:
        shape, device = (layer.num_heads, layer.num_slots), next(layer.parameters()).device
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self.weights = torch.zeros(shape, dtype=torch.float64, device=device)
        self._left = max_tokens

    @torch.no_grad()
    def __call__(self, layer: Any, args: tuple[Any, ...]) -> None:
        attended: Tensor = args[0]  # [B, T, D]
        if self._left <= 0:
            return
        self._left -= attended.shape[:-1].numel()
        slot_idx, weights = read_slots(layer, attended)
        slots = slot_idx.transpose(0, 1).flatten(1)  # [H, P * K]
        self.counts.scatter_add_(1, slots, torch.ones_like(slots))
        self.weights.scatter_add_(1, slots, weights.transpose(0, 1).flatten(1).double())

    def usage(self) -> SlotUsage:
        """What the counts so far come to."""
        return SlotUsage(
            used=(self.counts > 0).double().mean().item(),
            entropy=_entropy(self.counts.double()),
            weighted_entropy=_entropy(self.weights),
        )


def _entropy(amounts: Tensor) -> float:
    shares = torch.nan_to_num(amounts / amounts.sum(1, keepdim=True))  # 0 where nothing was read
    entropy: float = -torch.special.xlogy(shares, shares).sum(1).mean().item()
    return entropy / math.log(max(2, amounts.shape[1]))  # a single slot has no entropy


def memory_layers(model: nn.Module) -> dict[int, MemoryLayer]:
    """The memory layers by index in the final stack."""
    return {
        int(match[1]): module
        for name, module in model.named_modules()
        if isinstance(module, MemoryLayer) and (match := _LAYER.search(name))
    }


@contextmanager
def counting_slots(model: nn.Module, max_tokens: int) -> Iterator[dict[int, SlotCounter]]:
    """Counters by layer index, fed by whatever runs the model inside; empty without memory.

    Args:
        model: A model in evaluation mode.
        max_tokens: How many tokens count; the search for their slots is made a second time.
    """
    counters, hooks = {}, []
    for index, layer in memory_layers(model).items():
        counters[index] = SlotCounter(layer, max_tokens)
        hooks.append(layer.register_forward_pre_hook(counters[index]))
    try:
        yield counters
    finally:
        for hook in hooks:
            hook.remove()

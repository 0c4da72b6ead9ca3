"""How much of its memory a model uses: slots chosen, and how evenly, for each inserted block."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midus.memory.base import MemoryLayer


@dataclass(frozen=True)
class SlotUsage:
    """Of one inserted block, over the tokens that were read."""

    used: float
    """Share of the (head, slot) pairs chosen at least once."""
    entropy: float
    """Entropy of the choices, averaged over heads, as a share of the largest, log(slots)."""


@torch.no_grad()
def slot_usage(model: Any, batches: Iterable[dict[str, Tensor]]) -> dict[int, SlotUsage]:
    """Usage by layer index; empty for a model without memory.

    Args:
        model: A grown model, not sharded.
        batches: Inputs of the model.
    """
    layers = {
        index: block.memory
        for index, block in enumerate(model.model.layers)
        if isinstance(getattr(block, "memory", None), MemoryLayer)
    }
    counts = {
        index: torch.zeros(layer.num_heads, layer.num_slots, device=model.device)
        for index, layer in layers.items()
    }
    hooks = [
        layer.register_forward_pre_hook(_counter(counts[index])) for index, layer in layers.items()
    ]
    try:
        if layers:
            for batch in batches:
                model.model(input_ids=batch["input_ids"], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {index: _summary(count) for index, count in counts.items()}


def _counter(counts: Tensor) -> Any:
    def count(layer: Any, args: tuple[Any, ...]) -> None:
        slot_idx, _ = layer.keys(layer.make_queries(args[0]))  # [B, T, H, K]
        slots = slot_idx.flatten(0, -3).transpose(0, 1).flatten(1)  # [H, B * T * K]
        counts.scatter_add_(1, slots.long(), torch.ones_like(slots, dtype=counts.dtype))

    return count


def _summary(counts: Tensor) -> SlotUsage:
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
    entropy = -torch.special.xlogy(shares, shares).sum(1).mean().item()
    return SlotUsage(
        used=(counts > 0).float().mean().item(), entropy=entropy / math.log(counts.shape[1])
    )

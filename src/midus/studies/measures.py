"""What else can be told of a trial: slots, gradients a part, ranks, memory turned down."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from midus.memory.hive import HiveValues
from midus.models.slots import counting_slots
from midus.models.switch import MemorySwitch
from midus.studies.scoring import mean_loss
from midus.training.optim import find_parts
from midus.training.options import TrainOptions

_SLOT_TOKENS = 16_384
# What all corrections are multiplied by, one after the other.
_GATES = (0.95, 0.9, 0.8)


class PartNorms:
    """Sizes of the gradients a part (`find_parts`), the rest together as ``other``."""

    def __init__(self, model: Any) -> None:
        names = find_parts(model)
        self._parts: dict[str, list[Any]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._parts.setdefault(names.get(id(parameter), "other"), []).append(parameter)
        self._norms: dict[str, Tensor] = {}

    def take(self) -> None:
        """Reads the gradients that are there; the device is not waited for."""
        self._norms = {
            part: torch.nn.utils.get_total_norm(
                [p.grad for p in parameters if p.grad is not None]
            ).detach()
            for part, parameters in self._parts.items()
        }

    def values(self) -> dict[str, float]:
        """The norms as they were last read."""
        return {part: float(norm) for part, norm in self._norms.items()}


def slot_usage(
    model: Any, sequences: Tensor, options: TrainOptions, batch_size: int
) -> dict[str, dict[str, float]]:
    """Share of slots in use and entropy of their choice, by index of the memory block."""
    rows = -(-_SLOT_TOKENS // sequences.shape[1])
    with counting_slots(model, _SLOT_TOKENS) as counters:
        mean_loss(model, sequences[:rows], options, batch_size)
    usages = {index: counter.usage() for index, counter in counters.items()}
    return {
        str(index): {"used": usage.used, "entropy": usage.entropy}
        for index, usage in usages.items()
    }


@torch.no_grad()
def value_ranks(model: Any) -> list[float]:
    """Effective rank of each block's realized values ``V W_h``, averaged over its heads."""
    return [
        statistics.mean(
            effective_rank(values.latent_values.double() @ projection.double())
            for projection in values.value_proj
        )
        for values in model.modules()
        if isinstance(values, HiveValues)
    ]


def turned_down(model: Any, read: Callable[[], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What ``read`` gives under gates below 1, by the gate; empty without memory blocks."""
    if not isinstance(model, MemorySwitch):
        return {}
    found = {}
    try:
        for gate in _GATES:
            model.set_memory_gates(dict.fromkeys(model.memory_gates, gate))
            found[f"{gate:g}"] = read()
    finally:
        model.set_memory_gates({})
    return found


def effective_rank(matrix: Tensor) -> float:
    """How many directions count: exp of the entropy of the singular values' shares.

    Roy and Vetterli, 2007; 0 for a matrix of zeros. From the Gram matrix, whose eigenvalues are
    the squares of the singular values.
    """
    squares = torch.linalg.eigvalsh(matrix.mT @ matrix).clamp_min(0)
    values = squares.sqrt()
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values / total
    return math.exp(-torch.special.xlogy(shares, shares).sum().item())

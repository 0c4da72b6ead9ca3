"""Figures from counted choices: who uses which slots, and how large the corrections are."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_NUM_RANKS = 60


def overlap(counts: Tensor) -> dict[str, Any]:
    """How alike the heads' choices are, for every two of them.

    Args:
        counts: Choices ``[H, N]``.

    Returns:
        ``jaccard`` of the sets of used slots and ``cosine`` of the counts, each ``[H][H]``; their
        means over pairs of different heads (None with a single head); and what those means would
        be if every head had its choices on slots drawn at random.
    """
    amounts = counts.double().cpu()
    num_slots = amounts.shape[1]
    used = (amounts > 0).double()
    sizes = used.sum(1)
    directions = torch.nn.functional.normalize(amounts, dim=1)
    sums = directions.sum(1)
    jaccard = _jaccard(used @ used.T, sizes)
    cosine = directions @ directions.T
    return {
        "jaccard": jaccard.tolist(),
        "cosine": cosine.tolist(),
        "mean_jaccard": _mean_of_pairs(jaccard),
        "mean_cosine": _mean_of_pairs(cosine),
        # Sets that fall as they may have |A| |B| / N slots in common.
        "chance_jaccard": _mean_of_pairs(_jaccard(sizes.outer(sizes) / num_slots, sizes)),
        "chance_cosine": _mean_of_pairs(sums.outer(sums) / num_slots),
    }


def _jaccard(common: Tensor, sizes: Tensor) -> Tensor:
    return common / (sizes[:, None] + sizes - common).clamp_min(torch.finfo(common.dtype).tiny)


def _mean_of_pairs(matrix: Tensor) -> float | None:
    rows, cols = torch.triu_indices(len(matrix), len(matrix), offset=1)
    return matrix[rows, cols].mean().item() if len(rows) else None


def busiest_share(counts: Tensor, part: float = 0.01) -> float:
    """Share of all choices that fall on the busiest part of the (head, slot) pairs."""
    num = math.ceil(part * counts.numel())
    busiest = counts.flatten().topk(num).values.sum()
    return (busiest / counts.sum().clamp_min(1)).item()


def rank_frequency(counts: Tensor) -> dict[str, list[float]]:
    """Share of the choices by rank of the (head, slot) pair, at ranks evenly spaced in log."""
    shares = counts.flatten().sort(descending=True).values.double() / counts.sum().clamp_min(1)
    last = max(1, int((shares > 0).sum()))
    ranks = sorted({round(last ** (i / (_NUM_RANKS - 1))) for i in range(_NUM_RANKS)})
    return {"rank": ranks, "share": [shares[rank - 1].item() for rank in ranks]}


class CorrectionMeter:
    """Averages ``||correction||`` and ``||correction|| / ||x||`` of a memory block over tokens.

    The correction is the memory's own; what a ``bypass`` adds beside it is left out.

    Args:
        block: The memory block.
    """

    def __init__(self, block: Any) -> None:
        self._block = block
        self._stream = torch.empty(0)  # [B, T]
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._num_tokens = 0

    def see_stream(self, _: Any, args: tuple[Any, ...]) -> None:
        self._stream = args[0].float().norm(dim=-1)

    def see_correction(self, _: Any, __: Any, correction: Tensor) -> None:
        if self._block.is_joined:  # mapped later, with what attention found
            correction = self._block.bypass(correction)
        sizes = correction.float().norm(dim=-1)
        ratios = sizes / self._stream.clamp_min(torch.finfo(torch.float32).tiny)
        sums = torch.stack([sizes.double().sum(), ratios.double().sum()])
        self._sums = self._sums.to(sums.device) + sums
        self._num_tokens += ratios.numel()

    @property
    def norm(self) -> float:
        return self._sums[0].item() / max(1, self._num_tokens)

    @property
    def ratio(self) -> float:
        return self._sums[1].item() / max(1, self._num_tokens)


@contextmanager
def measuring_corrections(blocks: dict[int, Any]) -> Iterator[dict[int, CorrectionMeter]]:
    """Meters by layer index, fed by whatever runs the blocks' model inside."""
    meters, hooks = {}, []
    for index, block in blocks.items():
        meters[index] = meter = CorrectionMeter(block)
        hooks.append(block.register_forward_pre_hook(meter.see_stream))
        hooks.append(block.memory_output_proj.register_forward_hook(meter.see_correction))
    try:
        yield meters
    finally:
        for hook in hooks:
            hook.remove()

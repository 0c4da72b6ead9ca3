"""Two pictures of the theory in numbers: what heterogeneity costs sharing, what rank HIVE needs.

Paper, Section 4.3, with the same retrieval A for all heads. Losses are shares of the loss of no
correction at all.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from midus.analysis.fixed_retrieval import (
    Retrieval,
    best_hive_losses,
    common_retrieval_gap,
    headwise_loss,
    shared_loss,
)
from midus.analysis.random_retrieval import Sizes, draw_matrix, draw_normal, targets_with_banks

_SIZES = Sizes(num_heads=4, num_tokens=64, num_slots=40, top_k=4, head_width=8, rank=5)
_SCALES = [round(0.1 * i, 1) for i in range(11)]
_DEVIATION = 0.4


@dataclass(frozen=True)
class RankCurve:
    """HIVE's best loss at every rank, between those of the other two families."""

    rank: list[int]
    """From 0 (no correction) to the rank at which head-wise banks are matched."""
    hive_loss: list[float]
    headwise_loss: float
    shared_loss: float
    head_width: int
    """The theorem asks for ranks up to this (paper: d_h)."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rank_curve(retrieval: Retrieval, target: Tensor) -> RankCurve:
    """The curve of one A and its targets.

    Args:
        retrieval: The same A for all heads.
        target: Y_h, ``[H, T, O]``.
    """
    nothing = 0.5 * target.square().sum()
    num_heads, _, width = target.shape
    needed = min(retrieval.ranks[0], num_heads * width)
    losses = best_hive_losses(retrieval, target)[: needed + 1] / nothing
    return RankCurve(
        rank=list(range(len(losses))),
        hive_loss=losses.tolist(),
        headwise_loss=float(headwise_loss(retrieval, target) / nothing),
        shared_loss=float(shared_loss(retrieval, target) / nothing),
        head_width=width,
    )


def random_rank_curves(seed: int = 0) -> dict[str, RankCurve]:
    """Curves of targets whose best banks share a factorization, exactly and nearly."""
    generator = torch.Generator().manual_seed(seed)
    retrieval = Retrieval.of(draw_matrix(_SIZES, generator)).of_head(0)
    heads, tokens, slots, width = (
        _SIZES.num_heads,
        _SIZES.num_tokens,
        _SIZES.num_slots,
        _SIZES.head_width,
    )
    latent_values = draw_normal(slots, _SIZES.rank, generator=generator)
    value_proj = draw_normal(heads, _SIZES.rank, width, generator=generator)
    banks = latent_values @ value_proj / _SIZES.rank**0.5
    near = banks + _DEVIATION * draw_normal(heads, slots, width, generator=generator)
    # Both express targets of one size, so that their other losses are comparable.
    near = near * (retrieval.matrix @ banks).norm() / (retrieval.matrix @ near).norm()
    # What no bank can express is kept small beside what one can.
    outside = 0.3 * draw_normal(heads, tokens, width, generator=generator)
    return {
        name: rank_curve(retrieval, targets_with_banks(retrieval, bank, outside))
        for name, bank in (("exact", banks), ("near", near))
    }


def heterogeneity_curve(seed: int = 0) -> dict[str, list[float]]:
    """The gap of sharing for ``Y_h = common + scale * individual``, measured and by Proposition 1.

    Common and individual parts have the same norm; gaps are shares of the loss of no correction to
    the common part.
    """
    generator = torch.Generator().manual_seed(seed)
    retrieval = Retrieval.of(draw_matrix(_SIZES, generator)).of_head(0)
    shape = (_SIZES.num_heads, _SIZES.num_tokens, _SIZES.head_width)
    common = draw_normal(*shape[1:], generator=generator).expand(shape)
    individual = draw_normal(*shape, generator=generator)
    common, individual = common / common.norm(), individual / individual.norm()
    targets = [common + scale * individual for scale in _SCALES]
    nothing = 0.5 * common.square().sum()
    measured = [shared_loss(retrieval, y) - headwise_loss(retrieval, y) for y in targets]
    formula = [common_retrieval_gap(retrieval, y) for y in targets]
    return {
        "scale": _SCALES,
        "gap": [float(gap / nothing) for gap in measured],
        "formula": [float(gap / nothing) for gap in formula],
    }

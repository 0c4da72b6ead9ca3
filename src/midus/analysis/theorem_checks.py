"""Propositions 1 and 2 and Theorem 1, checked numerically: both sides of every formula, computed.

Losses are compared relative to ``1/2 sum_h ||Y_h||^2``, the loss of no correction at all.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from midus.analysis.fixed_retrieval import (
    Retrieval,
    best_factors,
    best_hive_losses,
    common_retrieval_gap,
    correction_loss,
    factorize,
    headwise_loss,
    hive_bound,
    hive_loss,
    shared_bank,
    shared_loss,
    sharing_gap,
    solve_shared,
)
from midus.analysis.random_retrieval import (
    draw_normal,
    draw_retrieval,
    draw_sizes,
    targets_with_banks,
)
from midus.errors import MidusError

Track = Callable[[Iterable[Any], str], Iterable[Any]]

EQUALITY_TOLERANCE = 1e-8
"""Relative error up to which two sides of an equality, or a bound, count as holding in float64."""
GAP_TOLERANCE = 1e-10
"""A relative gap above this is strict, one below it is none."""


@dataclass
class Findings:
    """The worst that was found."""

    max_equality_error: float = 0.0
    max_bound_violation: float = -math.inf
    """Negative: every bound was kept with room to spare."""
    min_strict_gap: float = math.inf
    """Smallest ``(L_Share - L_HIVE) / L_Share`` where Theorem 1 promises one."""
    counter_example_gap: float = 0.0
    """Largest gap where the projected targets are identical, so that there is none."""

    def equal(self, actual: Tensor, expected: Tensor | float, scale: Tensor) -> None:
        error = _number((actual - expected).abs() / scale)
        self.max_equality_error = max(self.max_equality_error, error)

    def at_most(self, value: Tensor | float, bound: Tensor, scale: Tensor) -> None:
        self.max_bound_violation = max(self.max_bound_violation, _number((value - bound) / scale))

    def failures(self) -> list[str]:
        """One clause for each statement that did not hold."""
        failed = []
        if self.max_equality_error > EQUALITY_TOLERANCE:
            failed.append(f"an equality is off by {self.max_equality_error:.2g} of the loss")
        if self.max_bound_violation > EQUALITY_TOLERANCE:
            failed.append(f"a bound is exceeded by {self.max_bound_violation:.2g} of the loss")
        if not self.min_strict_gap > GAP_TOLERANCE:
            failed.append(f"a gap that must be strict is {self.min_strict_gap:.2g}")
        if self.counter_example_gap > GAP_TOLERANCE:
            failed.append(f"the gap of a counter-example is {self.counter_example_gap:.2g}, not 0")
        return failed


def _number(value: Tensor) -> float:
    # NaN must not pass for small.
    number = float(value)
    return math.inf if math.isnan(number) else number


def check_proposition_1(retrieval: Retrieval, target: Tensor, found: Findings) -> None:
    """What one shared bank loses."""
    scale = 0.5 * target.square().sum()
    shared, alone = shared_loss(retrieval, target), headwise_loss(retrieval, target)
    by_formula = correction_loss(retrieval.matrix @ shared_bank(retrieval, target), target)
    best_alone = correction_loss(retrieval.matrix @ retrieval.fit(target), target)
    gap = sharing_gap(retrieval, target)
    found.equal(by_formula, shared, scale)
    found.equal(best_alone, alone, scale)
    found.equal(alone + gap, shared, scale)
    found.at_most(0.0, shared - alone, scale)
    # The gap is how far the heads are from a common bank, A_h V = Pi_{A_h} Y_h for all of them.
    projected = retrieval.project(target)
    nearest = correction_loss(retrieval.matrix @ solve_shared(retrieval, projected), projected)
    found.equal(nearest, gap, scale)


def check_common_bank(retrieval: Retrieval, target: Tensor, found: Findings) -> None:
    """Proposition 1, where a common bank exists: no gap."""
    scale = 0.5 * target.square().sum()
    found.equal(shared_loss(retrieval, target), headwise_loss(retrieval, target), scale)
    found.equal(sharing_gap(retrieval, target), 0.0, scale)


def check_common_retrieval(retrieval: Retrieval, target: Tensor, found: Findings) -> None:
    """Proposition 1, where A_h = A: the gap is the spread of the projected targets."""
    scale = 0.5 * target.square().sum()
    gap = shared_loss(retrieval, target) - headwise_loss(retrieval, target)
    found.equal(common_retrieval_gap(retrieval, target), gap, scale)


def check_proposition_2(
    retrieval: Retrieval,
    target: Tensor,
    latent_values: Tensor,
    value_proj: Tensor,
    found: Findings,
) -> tuple[float, float]:
    """HIVE's loss stays below its bound.

    Returns:
        The loss and the bound.
    """
    scale = 0.5 * target.square().sum()
    loss = hive_loss(retrieval, target, latent_values, value_proj)
    bound = hive_bound(retrieval, target, latent_values, value_proj)
    found.at_most(loss, bound, scale)
    # The step of the proof before the bound: L(HIVE) = L_Ind + 1/2 sum_h ||A_h R_h||^2.
    missed = retrieval.matrix @ (retrieval.fit(target) - latent_values @ value_proj)
    exact = headwise_loss(retrieval, target) + 0.5 * missed.square().sum()
    found.equal(loss, exact, torch.maximum(scale, loss))
    return float(loss), float(bound)


def check_theorem_1(retrieval: Retrieval, target: Tensor, rank: int, found: Findings) -> float:
    """HIVE reaches the head-wise optimum and a shared bank does not, where A_h = A.

    Args:
        retrieval: The same A for all heads.
        target: Targets whose best banks have a factorization of that rank.
        rank: Width of the latent table, at most a head's width.
        found: Where the result goes.

    Returns:
        The relative gap ``(L_Share - L_HIVE) / L_Share``.
    """
    assert rank <= target.shape[-1], "the theorem asks for r <= d_h"
    scale = 0.5 * target.square().sum()
    loss = hive_loss(retrieval, target, *factorize(retrieval.fit(target), rank))
    found.equal(loss, headwise_loss(retrieval, target), scale)
    shared = shared_loss(retrieval, target)
    gap = float((shared - loss) / shared)
    found.min_strict_gap = min(found.min_strict_gap, -math.inf if math.isnan(gap) else gap)
    return gap


def check_best_hive(retrieval: Retrieval, target: Tensor, rank: int, found: Findings) -> None:
    """Where A_h = A, HIVE's best loss follows from the singular values of the targets."""
    scale = 0.5 * target.square().sum()
    best = hive_loss(retrieval, target, *best_factors(retrieval, target, rank))
    # Ranks beyond those of the targets change nothing.
    found.equal(best, best_hive_losses(retrieval, target)[: rank + 1][-1], scale)


def check_counter_example(retrieval: Retrieval, target: Tensor, found: Findings) -> None:
    """Identical projected targets: one shared bank is as good as any."""
    scale = 0.5 * target.square().sum()
    gap = (shared_loss(retrieval, target) - headwise_loss(retrieval, target)).abs()
    found.counter_example_gap = max(found.counter_example_gap, _number(gap / scale))


def check_random_instances(
    num_instances: int, seed: int = 0, track: Track = lambda items, _: items
) -> Findings:
    """Everything on random instances: fewer tokens than slots, more, and deficient ranks in turn.

    Args:
        num_instances: How many.
        seed: The first instances of a seed are the same however many follow.
        track: Wraps the loop in a progress bar.
    """
    if num_instances < 1:
        raise MidusError(f"instances={num_instances} checks nothing; give 1 or more")
    if not 0 <= seed < 2**32:
        raise MidusError(f"seed={seed} must be a whole number from 0 to {2**32 - 1}")
    generator = torch.Generator().manual_seed(seed)
    found = Findings()
    for index in track(range(num_instances), "checking random instances"):
        _check_instance(index % 3, generator, found)
    return found


def _check_instance(regime: int, generator: Generator, found: Findings) -> None:
    sizes = draw_sizes(regime, generator)
    retrieval = draw_retrieval(sizes, regime, generator)

    def normal(*shape: int) -> Tensor:
        return draw_normal(*shape, generator=generator)

    heads, width = sizes.num_heads, sizes.head_width
    target = normal(heads, sizes.num_tokens, width)
    outside = normal(heads, sizes.num_tokens, width)
    one_bank = normal(sizes.num_slots, width)
    latent_values, value_proj = (
        normal(sizes.num_slots, sizes.rank),
        normal(heads, sizes.rank, width),
    )

    check_proposition_1(retrieval, target, found)
    check_common_bank(retrieval, targets_with_banks(retrieval, one_bank, outside), found)
    check_proposition_2(retrieval, target, latent_values, value_proj, found)
    for rank in range(1, width + 1):
        factors = factorize(retrieval.fit(target), rank)
        check_proposition_2(retrieval, target, *factors, found)

    same = retrieval.of_head(0)
    check_common_retrieval(same, target, found)
    check_best_hive(same, target, sizes.rank, found)
    structured = targets_with_banks(same, latent_values @ value_proj, outside)
    check_theorem_1(same, structured, sizes.rank, found)
    check_counter_example(same, targets_with_banks(same, one_bank, outside), found)

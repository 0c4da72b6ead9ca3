"""What a study says of scaling: a law for each series or why there is none, and what it predicts.

The paper, appendix, "Ablation study on the number of memory slots", calls n an axis to scale
quality on. docs/scaling.md says what the figures mean.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from midus.errors import MidusError
from midus.studies.power_law import Array, Law, draw_laws, fit_law, interval, r_squared
from midus.studies.scaling_series import Point, Series, read_series

FEWEST_POINTS = 4
# Differences in nats that mean nothing here, whatever the seeds say.
SMALLEST_RANGE = 0.005
# The range of four to eight points that are noise alone is under so many of its standard
# deviations in about 19 of 20 cases (the studentized range is 3.6 to 4.3).
_NOISE_RANGE = 4.0
# How far beyond the data two laws are followed to where they cross.
_CROSSING_DECADES = 6
_STEPS_A_DECADE = 200


@dataclass(frozen=True)
class Fit:
    """One series and its law."""

    series: Series
    points: list[Point]
    law: Law | None
    """None where no law means anything; `why_not` says why."""
    draws: Law | None
    """Laws that noise of the same size would have given."""
    r2: float | None
    span: float
    """Largest minus smallest mean loss."""
    why_not: str = ""


@dataclass(frozen=True)
class Prediction:
    """A loss that a law says."""

    x: float
    loss: float
    low: float
    high: float
    decades: float
    """How far outside the data, in powers of ten; 0 inside."""


@dataclass(frozen=True)
class Crossing:
    """Where two laws have the same loss."""

    one: Fit
    other: Fit
    places: list[float]
    """Empty where they do not cross between the first x and a million times the last."""
    until: float
    """How far they were followed."""
    share: float
    """Share of the draws, pair by pair, that cross at all."""


@dataclass(frozen=True)
class Scaling:
    """All of it."""

    over: str
    curves: bool
    fits: list[Fit]
    short: list[Series]
    """Series with too few points."""
    crossings: list[Crossing]
    num_failed: int


def make_scaling(out: Path, over: str, curves: bool = False) -> Scaling:
    """Reads a study's folder and fits what can be fitted.

    Args:
        out: The folder.
        over: ``slots`` or ``tokens``.
        curves: See `read_series`.

    Raises:
        MidusError: Where there are no results, or nowhere enough points.
    """
    found, num_failed = read_series(out, over, curves)
    found.sort(key=lambda series: (series.method, _natural(series)))
    short = [series for series in found if len(series.places) < FEWEST_POINTS]
    enough = [series for series in found if series not in short]
    if not enough:
        most = max((len(series.places) for series in found), default=0)
        raise MidusError(
            f"{out} has no method with {FEWEST_POINTS} numbers of {over} and all else equal (the "
            f"most is {most}), and a law has three unknowns; run more of them, as "
            "studies/scaling.yaml does"
        )
    fits = [fit_series(series, over) for series in enough]
    crossings = _all_crossings(fits) if over == "tokens" else []
    return Scaling(over, curves, fits, short, crossings, num_failed)


def fit_series(series: Series, over: str = "x") -> Fit:
    """The law of a series, or why there is none.

    Raises:
        MidusError: With fewer than four places.
    """
    points, means = series.fitted(), series.means()
    if len(means) < FEWEST_POINTS:
        raise MidusError(
            f"{series.label} has {len(means)} points and a law has three unknowns; give at least "
            f"{FEWEST_POINTS}"
        )
    span = max(means) - min(means)
    noise = _NOISE_RANGE * (series.spread or 0.0) / math.sqrt(len(points) / len(means))
    if span < max(SMALLEST_RANGE, noise):
        limit = f"{SMALLEST_RANGE}" if noise <= SMALLEST_RANGE else f"the seeds' spread {noise:.4f}"
        why_not = f"flat: losses span {span:.4f}, under {limit}"
        return Fit(series, points, None, None, None, span, why_not)
    x = np.array([point.x for point in points])
    losses = np.array([point.loss for point in points])
    law = fit_law(x, losses)
    if law.scale == 0:
        return Fit(series, points, None, None, None, span, f"loss does not fall with {over}")
    draws = draw_laws(x, losses, law, series.spread or 0.0)
    return Fit(series, points, law, draws, r_squared(x, losses, law), span)


def predict(fit: Fit, x: float) -> Prediction:
    """The loss at ``x`` by a fit that has a law."""
    assert fit.law
    assert fit.draws
    low, high = interval(fit.draws.loss([x])[:, 0])
    return Prediction(x, float(fit.law.loss([x])[0]), low, high, decades_outside(fit.series, x))


def decades_outside(series: Series, x: float) -> float:
    """How many powers of ten ``x`` lies outside the data."""
    first, *_, last = series.places
    return max(0.0, math.log10(x / last), math.log10(first / x))


def ratio(fit: Fit, start: float, end: float) -> tuple[float, float, float]:
    """L(end) / L(start) with its interval: what another model is assumed to see, too."""
    assert fit.law
    assert fit.draws
    losses, drawn = fit.law.loss([start, end]), fit.draws.loss([start, end])
    return (float(losses[1] / losses[0]), *interval(drawn[:, 1] / drawn[:, 0]))


def cross(one: Fit, other: Fit) -> Crossing:
    """Where the laws of two fits meet, from the first point to far beyond the last."""
    assert one.law
    assert one.draws
    assert other.law
    assert other.draws
    places = [*one.series.places, *other.series.places]
    start, end = math.log10(min(places)), math.log10(max(places)) + _CROSSING_DECADES
    exponents = np.linspace(start, end, math.ceil((end - start) * _STEPS_A_DECADE))
    found = _changes((one.law.loss(10**exponents) - other.law.loss(10**exponents))[None])[0]
    pairs = [(exponents[i], exponents[i + 1]) for i in np.flatnonzero(found)]
    # Draws are made from the same random numbers for every fit; in another order they are apart.
    order = np.random.default_rng(1).permutation(len(one.draws.alpha))
    drawn = _changes(one.draws.loss(10**exponents) - other.draws.loss(10**exponents)[order])
    met = [_bisect(one.law, other.law, low, high) for low, high in pairs]
    return Crossing(one, other, met, 10**end, float(drawn.any(-1).mean()))


def _changes(difference: Array) -> Any:
    """Where a difference ``[S, m]`` changes its sign on the way to the next entry."""
    is_above = difference >= 0
    return is_above[:, 1:] != is_above[:, :-1]


def _bisect(one: Law, other: Law, low: float, high: float) -> float:
    def is_above(exponent: float) -> bool:
        return bool((one.loss([10**exponent]) >= other.loss([10**exponent]))[0])

    at_low = is_above(low)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_above(middle) == at_low else (low, middle)
    return float(10 ** ((low + high) / 2))


def _all_crossings(fits: list[Fit]) -> list[Crossing]:
    """Of any two methods on the same base and data."""
    with_law = [fit for fit in fits if fit.law]
    return [
        cross(one, other)
        for number, one in enumerate(with_law)
        for other in with_law[number + 1 :]
        if one.series.method != other.series.method and one.series.identity == other.series.identity
    ]


def _natural(series: Series) -> list[tuple[bool, Any]]:
    """Numbers by size, everything else by its letters."""
    values = series.facts.values()
    return [
        (True, str(v)) if not isinstance(v, int | float) or isinstance(v, bool) else (False, v)
        for v in values
    ]

"""L(x) = E + A x^-alpha through a few points: fitted over a grid, drawn again for intervals.

The form is the usual one of scaling laws; the paper, which calls slots an axis to scale on, gives
none. Shape letters: S fits at a time, m points, G exponents tried.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_PARAMETERS = 3
SMALLEST_ALPHA, LARGEST_ALPHA = 0.01, 4.0
_NUM_ALPHAS, _NUM_FINER, _ROUNDS = 121, 21, 3
_NUM_DRAWS = 1000


@dataclass(frozen=True)
class Law:
    """One law, or as many as its arrays have entries."""

    floor: Array
    """E, what no x takes away; never below 0."""
    scale: Array
    """A; 0 where the loss does not fall."""
    alpha: Array

    def loss(self, x: Any) -> Array:
        """Losses at every ``x`` ``[m]``: ``[m]`` of one law, ``[S, m]`` of several."""
        x = np.asarray(x, dtype=np.float64)
        falling: Array = self.scale[..., None] * x ** -self.alpha[..., None]
        return self.floor[..., None] + falling

    def at_edge(self) -> bool:
        """Whether the exponent of one law is the smallest or largest that is tried."""
        return not SMALLEST_ALPHA * 1.01 < self.alpha < LARGEST_ALPHA / 1.01


def fit_law(x: Array, losses: Array) -> Law:
    """The law with the least squared error through points ``[m]``."""
    many = fit_laws(x, losses[None])
    return Law(many.floor[0], many.scale[0], many.alpha[0])


def fit_laws(x: Array, losses: Array) -> Law:
    """The same for several losses at the same points.

    For each exponent of a grid E and A are ordinary least squares; the grid is then drawn closer
    around the best one. Nothing can get stuck, whatever the units of ``x``.

    Args:
        x: Where the points are, ``[m]``.
        losses: ``[S, m]``.
    """
    centre = np.exp(np.log(x).mean())
    alphas = np.geomspace(SMALLEST_ALPHA, LARGEST_ALPHA, _NUM_ALPHAS)[:, None]  # [G, 1]
    width = float(alphas[1, 0] / alphas[0, 0])
    for rounds_left in reversed(range(_ROUNDS + 1)):
        powers = (x / centre) ** -alphas[..., None]  # [G, S or 1, m]
        floors, scales, errors = _least_squares(powers, losses)  # [G, S]
        best = errors.argmin(0)[None]
        alpha = np.take_along_axis(np.broadcast_to(alphas, errors.shape), best, 0)[0]
        if rounds_left:
            finer = np.linspace(alpha / width, alpha * width, _NUM_FINER)
            alphas = np.clip(finer, SMALLEST_ALPHA, LARGEST_ALPHA)  # [G, S]
            width = 1 + 2 * (width - 1) / (_NUM_FINER - 1)
    floor, scale = (np.take_along_axis(values, best, 0)[0] for values in (floors, scales))
    return Law(floor, scale * centre**alpha, alpha)


def draw_laws(x: Array, losses: Array, law: Law, least_noise: float = 0.0) -> Law:
    """Laws that other noise of the same size would have given: a parametric bootstrap.

    How large the noise is, is itself known from ``m - 3`` residuals only; each draw takes a size
    that fits them, so that few points have wide intervals. The draws are the same every time.

    Args:
        x: Where the points are, ``[m]``.
        losses: ``[m]``.
        law: What was fitted to them.
        least_noise: Standard deviation that is known from elsewhere: a few residuals can be small
            by luck.
    """
    generator = np.random.default_rng(0)
    fitted = law.loss(x)
    error = float(((losses - fitted) ** 2).sum())
    degrees = generator.chisquare(len(x) - NUM_PARAMETERS, _NUM_DRAWS)
    sizes = np.maximum(np.sqrt(error / degrees), least_noise)
    noise = generator.standard_normal((_NUM_DRAWS, len(x))) * sizes[:, None]
    return fit_laws(x, fitted + noise)


def interval(draws: Array) -> tuple[float, float]:
    """Where 95 % of the draws lie."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def r_squared(x: Array, losses: Array, law: Law) -> float:
    """Share of the losses' variance that the law explains."""
    left = float(((losses - law.loss(x)) ** 2).sum())
    return 1 - left / float(((losses - losses.mean()) ** 2).sum())


def _least_squares(powers: Array, losses: Array) -> tuple[Array, Array, Array]:
    """E, A and squared error for each exponent, with neither E nor A below 0."""
    mean = losses.mean(-1)
    apart = powers - powers.mean(-1, keepdims=True)
    scale = (apart * losses).sum(-1) / (apart**2).sum(-1)
    floor = mean - scale * powers.mean(-1)
    through_zero = (powers * losses).sum(-1) / (powers**2).sum(-1)
    scale = np.where(floor < 0, through_zero, scale)
    is_falling = scale > 0
    floor = np.where(is_falling, np.maximum(floor, 0), mean)
    scale = np.where(is_falling, scale, 0)
    error = ((losses - floor[..., None] - scale[..., None] * powers) ** 2).sum(-1)
    return floor, scale, error

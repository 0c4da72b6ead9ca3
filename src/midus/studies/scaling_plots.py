"""The picture of scaling: losses against slots or tokens, laws, and where 95 % of them lie."""

from pathlib import Path
from typing import Any

import numpy as np

from midus.plot_style import STYLE
from midus.studies.plots import make_figure
from midus.studies.scaling import Fit, Scaling

_LABELS = {"slots": "slots a head, N = n²", "tokens": "tokens"}


def plot_scaling(scaling: Scaling, at: list[float], path: Path, title: str) -> None:
    """Draws every series with enough points.

    Args:
        scaling: What was found.
        at: Where predictions were asked for; laws are drawn as far.
        path: File to write.
        title: Over the picture.
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, axes = make_figure((8.0, 4.2), title)
        for number, fit in enumerate(scaling.fits):
            _plot(axes, fit, at, f"C{number % 10}")
        axes.set(
            xscale="log",
            xlabel=_LABELS[scaling.over],
            ylabel="validation loss (nats per token)",
        )
        inside = "inside one run each" if scaling.curves else "the ends of runs"
        axes.set_title(f"E + A x^-alpha through {inside}, and 95 % intervals")
        figure.legend(loc="outside right upper", fontsize=8)
        figure.savefig(path, dpi=130)


def _plot(axes: Any, fit: Fit, at: list[float], colour: str) -> None:
    x, losses = [p.x for p in fit.points], [p.loss for p in fit.points]
    label = fit.series.label if fit.law else f"{fit.series.label} (no law)"
    axes.plot(x, losses, "o", markersize=4, color=colour, label=label)
    if not fit.law or not fit.draws:
        return
    first, last = min(x), max(x)
    beyond = np.geomspace(min([first, *at]), max([last, *at]), 200)
    low, high = np.quantile(fit.draws.loss(beyond), [0.025, 0.975], axis=0)
    axes.fill_between(beyond, low, high, color=colour, alpha=0.12, linewidth=0)
    is_inside = (beyond >= first) & (beyond <= last)
    for where, line in ((beyond <= first, ":"), (is_inside, "-"), (beyond >= last, ":")):
        axes.plot(beyond[where], fit.law.loss(beyond[where]), line, color=colour, linewidth=1.3)

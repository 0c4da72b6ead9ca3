"""A picture of what was varied one setting at a time: how far each is from the method as it is."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus.plot_style import DARK, STYLE, WARM
from midus.studies.report import StudyReport
from midus.studies.results import Row, is_done
from midus.studies.trials import Trial, say_setting

SETTINGS_NAME = "settings.png"


@dataclass(frozen=True)
class Varied:
    """One setting away from a method."""

    label: str
    changes: list[float]
    """Of validation perplexity against the method as it is, in per cent, one a seed."""


def find_varied(report: StudyReport) -> dict[str, list[Varied]]:
    """What has ended of each method that varies something, by its label.

    Where a method searches besides, each setting is at the best of what it searched. Tokens are not
    a setting: more of them are no choice.
    """
    found: dict[str, list[Varied]] = {}
    for name, method in report.study.methods.items():
        searched = report.study.search if method.search is None else method.search
        alone = {option: values for option, values in method.vary.items() if option not in searched}
        ended = [(t, r) for t, r in report.searched if t.method == name and r and is_done(r)]
        plain = _losses(pair for pair in ended if not alone.keys() & pair[0].varied.keys())
        varied = []
        settings = [(o, v) for o, vs in alone.items() if not o.startswith("data.") for v in vs]
        for option, value in settings:
            own = _losses(
                p for p in ended if option in p[0].varied and p[0].varied[option] == value
            )
            changes = [100 * math.expm1(own[seed] - plain[seed]) for seed in own if seed in plain]
            if changes:
                varied.append(Varied(say_setting({option: value}), changes))
        if varied:
            found[method.label or name] = varied
    return found


def _losses(ended: Iterable[tuple[Trial, Row]]) -> dict[int, float]:
    """Validation loss by seed, at the best of the settings that were searched besides."""
    by_setting: dict[str, dict[int, float]] = {}
    for trial, row in ended:
        if (loss := row["validation"]["loss"]) is not None:
            by_setting.setdefault(trial.setting, {})[trial.seed] = loss
    return min(by_setting.values(), key=lambda own: statistics.mean(own.values()), default={})


def plot_settings(report: StudyReport, out: Path) -> list[str]:
    """Draws them into ``out``; the name of the file, if there is something to draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = find_varied(report)
    if not found:
        return []
    rows = [len(varied) for varied in found.values()]
    with rc_context(STYLE):
        figure = Figure(
            figsize=(8.0, 1.0 + 0.22 * sum(rows) + 0.4 * len(rows)), layout="constrained"
        )
        figure.suptitle(report.study.name, x=0.01, ha="left", fontsize=11)
        panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)
        for axes, (label, varied) in zip(panels[:, 0], found.items(), strict=True):
            axes.set_title(f"{label}, one setting at a time")
            _draw(axes, varied)
        panels[-1, 0].set_xlabel("change of validation perplexity, % (less is better)")
        figure.savefig(out / SETTINGS_NAME, dpi=130)
    return [SETTINGS_NAME]


def _draw(axes: Any, varied: list[Varied]) -> None:
    axes.axvline(0, color="black", linewidth=0.8)
    for place, one in enumerate(varied):
        mean = statistics.mean(one.changes)
        error = statistics.stdev(one.changes) if len(one.changes) > 1 else None
        color = WARM if mean > 0 else DARK
        axes.barh(place, mean, height=0.6, color=color, xerr=error, capsize=2)
        axes.annotate(
            f"{mean:+.2f}",
            (mean, place),
            (4 if mean > 0 else -4, 0),
            textcoords="offset points",
            ha="left" if mean > 0 else "right",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(varied)), [one.label for one in varied], fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12, y=0.02)

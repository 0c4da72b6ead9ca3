"""The curves of runs: losses, rates, slots, speed. Several runs share their charts."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from midus.report.document import Chart, Point, Series
from midus.report.numbers import is_number
from midus.report.runs import Run

_BEFORE, _AFTER = "before", "after"


def training_charts(runs: Sequence[tuple[str, Run]]) -> list[Chart]:
    """Every chart that something was logged for.

    Args:
        runs: Label and run.
    """
    texts = "Each run's held-out text is its own." if len(runs) > 1 else ""
    charts = [
        Chart("Loss", "step", "nats per token", _losses(runs), note=texts),
        Chart("Learning rate", "step", "rate", _rates(runs), from_zero=True),
        Chart(
            "Slots used while training",
            "step",
            "per cent of slots",
            _usage_over_steps(runs),
            from_zero=True,
            note="Line: mean of the blocks; area: lowest to highest. On the held-out text.",
        ),
        Chart(
            "Slots used by block",
            "block",
            "per cent of slots",
            _by_block(runs, "slots_used/"),
            from_zero=True,
            note="Share of the slots of all heads that were read at least once.",
        ),
        Chart(
            "Evenness of slot choice by block",
            "block",
            "entropy, per cent of the largest",
            _by_block(runs, "slots_entropy/"),
            from_zero=True,
            note="100 per cent: every slot is read equally often.",
        ),
        Chart("Gradient norm", "step", "norm", _plain(runs, "grad_norm"), may_be_log=True),
        Chart(
            "Speed", "step", "tokens per second", _plain(runs, "tokens_per_second"), may_be_log=True
        ),
    ]
    return [chart for chart in charts if chart.series]


def _named(label: str, what: str, runs: Sequence[tuple[str, Run]]) -> str:
    """A run's label is needed only where there are several."""
    return what if len(runs) == 1 else f"{label}, {what}"


def _losses(runs: Sequence[tuple[str, Run]]) -> list[Series]:
    series = []
    for i, (label, run) in enumerate(runs):
        if points := run.curve("loss"):
            series.append(Series(_named(label, "training", runs), points, colour=i, is_faint=True))
        if points := run.curve("eval_loss"):
            colour = i if len(runs) > 1 else 1
            name = _named(label, "held-out", runs)
            series.append(Series(name, points, colour=colour, has_dots=True))
    return series


def _rates(runs: Sequence[tuple[str, Run]]) -> list[Series]:
    """A line for every group of parameters; groups with one rate share theirs."""
    series = []
    for i, (label, run) in enumerate(runs):
        groups: dict[tuple[tuple[float, float], ...], list[str]] = {}
        for name in run.keys("lr/"):
            groups.setdefault(tuple(run.curve(f"lr/{name}")), []).append(name.replace("_", " "))
        if not groups:
            groups[tuple(run.curve("learning_rate"))] = ["rate"]
        for j, (points, names) in enumerate(groups.items()):
            if points:
                name = _named(label, " and ".join(names), runs)
                colour = i if len(runs) > 1 else j
                series.append(Series(name, list(points), colour=colour, dash=j))
    return series


def _usage_over_steps(runs: Sequence[tuple[str, Run]]) -> list[Series]:
    series = []
    for i, (label, run) in enumerate(runs):
        points, band = [], []
        for row in run.metrics:
            shares = [100 * share for _, share in _by_index(row, "slots_used/")]
            if shares:
                points.append((row["step"], fmean(shares)))
                band.append((row["step"], min(shares), max(shares)))
        if len(points) > 1:
            name = label if len(runs) > 1 else "mean of the blocks"
            series.append(Series(name, points, colour=i, has_dots=True, band=band))
    return series


def _by_block(runs: Sequence[tuple[str, Run]], prefix: str) -> list[Series]:
    """The first and the last count of a run; of several runs the last."""
    series = []
    for i, (label, run) in enumerate(runs):
        counts = [row for row in run.metrics if _by_index(row, prefix)]
        chosen = [(_AFTER, counts[-1])] if counts else []
        if len(runs) == 1 and len(counts) > 1:
            chosen.insert(0, (_BEFORE, counts[0]))
        for j, (when, row) in enumerate(chosen):
            points = [(block, 100 * share) for block, share in _by_index(row, prefix)]
            name = f"{when} (step {row['step']:,})"
            series.append(
                Series(_named(label, name, runs), points, colour=i + j, dash=j, has_dots=True)
            )
    return series


def _by_index(row: dict[str, Any], prefix: str) -> list[Point]:
    """(block, value) of a line's values of that kind, in the order of the stack."""
    found = [
        (key.removeprefix(prefix), value) for key, value in row.items() if key.startswith(prefix)
    ]
    return sorted((int(i), value) for i, value in found if i.isdigit() and is_number(value))


def _plain(runs: Sequence[tuple[str, Run]], key: str) -> list[Series]:
    return [
        Series(label if len(runs) > 1 else key.replace("_", " "), points, colour=i)
        for i, (label, run) in enumerate(runs)
        if (points := run.curve(key))
    ]

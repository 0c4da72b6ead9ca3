"""Pictures of a study: loss against tokens, perplexity against trained parameters."""

import math
import statistics
from pathlib import Path
from typing import Any

from midus.plot_style import STYLE
from midus.studies.figures import Line, tokens_read
from midus.studies.report import StudyReport

CURVES_NAME, PARAMETERS_NAME = "curves.png", "parameters.png"
# Where a name may stand beside its point, in points of print, and which side of it is there.
_PLACES = [(6, 0, "left"), (6, 8, "left"), (6, -8, "left"), (-6, 0, "right"), (-6, 8, "right")]
_PLACES += [(-6, -8, "right"), (0, 12, "center"), (0, -12, "center"), (6, 16, "left")]

# Curves whose names leave room where losses, which fall, do not come.
_FEW = 6

# A point, its name and its colour.
Named = tuple[float, float, str, str]


def plot_study(report: StudyReport, out: Path) -> list[str]:
    """Draws what there is to draw into ``out``; the names of the files."""
    from matplotlib import rc_context

    trained = [line for line in report.lines if line.choice and any(_curve(line))]
    if not trained:
        return []
    with rc_context(STYLE):
        title = f"{report.study.name}{_length(trained)}"
        _plot_curves(trained, out / CURVES_NAME, title)
        _plot_parameters(report.lines, out / PARAMETERS_NAME, title)
    return [CURVES_NAME, PARAMETERS_NAME]


def _length(lines: list[Line]) -> str:
    """How long the trials of a picture are, where they are as long as each other."""
    found = {tokens_read(row) for line in lines for row in line.rows}
    return f": trials of {found.pop():,} tokens" if len(found) == 1 else ""


def _plot_curves(lines: list[Line], path: Path, title: str) -> None:
    figure, axes = make_figure((8.0, 4.2), title)
    for number, line in enumerate(lines):
        points = _curve(line)
        axes.plot(
            [tokens for tokens, _ in points],
            [loss for _, loss in points],
            marker="o",
            markersize=3,
            color=f"C{number % 10}",
            linestyle="-" if number < 10 else "--",
            label=line.label,
        )
    axes.set(xscale="log", xlabel="tokens", ylabel="validation loss (nats per token)")
    axes.set_title("Best setting of each method, mean over seeds")
    if len(lines) <= _FEW:
        axes.legend(loc="upper right", fontsize=8)
    else:
        figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=130)


def _plot_parameters(lines: list[Line], path: Path, title: str) -> None:
    figure, axes = make_figure((8.0, 4.2), title)
    named: list[Named] = []
    for number, line in enumerate(lines):
        values = line.values(lambda row: row["test"]["perplexity"])
        mean, params = statistics.mean(values), line.rows[0]["trainable"]
        if not line.choice:
            axes.axhline(mean, color="#9a9a9a", linewidth=1, label=line.label)
            continue
        error = statistics.stdev(values) if len(values) > 1 else 0.0
        axes.errorbar(
            params / 1e6,
            mean,
            yerr=error,
            fmt="os"[number // 10 % 2],
            color=f"C{number % 10}",
            capsize=3,
        )
        named.append((params / 1e6, mean, line.label, f"C{number % 10}"))
    axes.set(xscale="log", xlabel="trained parameters, millions", ylabel="test perplexity")
    axes.set_title("Mean and standard deviation over seeds")
    name_points(figure, axes, named)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def name_points(figure: Any, axes: Any, named: list[Named]) -> None:
    """Writes each name beside its point, where it covers the fewest points and other names."""
    figure.draw_without_rendering()  # sizes are known then
    points = [axes.transData.transform((x, y)) for x, y, *_ in named]
    boxes: list[Any] = []
    for own, (x, y, name, color) in zip(points, named, strict=True):
        tries = [
            axes.annotate(
                name,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                ha=ha,
                va="center",
                fontsize=8,
                color=color,
            )
            for dx, dy, ha in _PLACES
        ]
        found = [text.get_window_extent() for text in tries]
        covered = [
            sum(box.overlaps(other) for other in boxes)
            + sum(box.padded(4).contains(*point) for point in points)
            + sum(_distance(box, point) < _distance(box, own) for point in points)
            + (not axes.bbox.containsx(box.x0) or not axes.bbox.containsx(box.x1))
            for box in found
        ]
        best = covered.index(min(covered))
        boxes.append(found[best])
        for number, text in enumerate(tries):
            if number != best:
                text.remove()


def _distance(box: Any, point: Any) -> float:
    """From the middle of a name's height, at its nearer end, to a point."""
    x, y = point
    return math.hypot(max(box.x0 - x, 0.0, x - box.x1), (box.y0 + box.y1) / 2 - y)


def _curve(line: Line) -> list[tuple[int, float]]:
    """Tokens and mean validation loss at the points where every seed has a number."""
    curves = [
        {
            point["tokens"]: point["validation_loss"]
            for point in row.get("curve", [])
            if point["validation_loss"] is not None
        }
        for row in line.rows
    ]
    common = set.intersection(*map(set, curves)) if curves else set()
    return [(t, statistics.mean(curve[t] for curve in curves)) for t in sorted(common)]


def make_figure(size: tuple[float, float], title: str) -> tuple[Any, Any]:
    """A figure with a title and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, figure.subplots()

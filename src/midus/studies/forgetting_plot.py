"""A picture of what was learnt against what was forgotten, blocks as trained and turned down."""

import statistics
from pathlib import Path

from midus.plot_style import DARK, STYLE
from midus.studies.figures import Line, of_text, on_test
from midus.studies.plots import Named, make_figure, name_points
from midus.studies.report import StudyReport

FORGETTING_NAME = "forgetting.png"


def plot_forgetting(report: StudyReport, out: Path) -> list[str]:
    """Draws it for the study's first text; the name of the file, or nothing without one."""
    from matplotlib import rc_context

    text = next(iter(report.study.texts), None)
    paths = [(line.label, path) for line in report.lines if (path := find_path(line, text))]
    if not text or not paths:
        return []
    with rc_context(STYLE):
        figure, axes = make_figure((8.0, 4.2), report.study.name)
        named: list[Named] = []
        for number, (label, path) in enumerate(paths):
            color = f"C{number % 10}"
            axes.plot(*zip(*path, strict=True), color=color, linewidth=1, marker="o", markersize=2)
            axes.plot(*path[0], color=color, marker="os"[number // 10 % 2])
            named.append((*path[0], label, color))
        untouched = [line for line in report.lines if line.choice is None]
        for value in (value for line in untouched for value in line.values(of_text(text))):
            axes.axhline(value, color=DARK, linewidth=1, linestyle=":", label="the base as it came")
        axes.set(xlabel="test perplexity", ylabel=f"{text}, perplexity a word")
        axes.set_title("Mean over seeds, and memory blocks turned down; better is down and left")
        name_points(figure, axes, named)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        figure.savefig(out / FORGETTING_NAME, dpi=130)
    return [FORGETTING_NAME]


def find_path(line: Line, text: str | None) -> list[tuple[float, float]]:
    """Test and text's perplexity of a trained method: as trained, then by falling gates.

    Means over seeds; gates that not every seed was read under are left out.
    """
    if text is None or line.choice is None:
        return []
    pick = of_text(text)
    turned = [row.get("measures", {}).get("gates", {}) for row in line.rows]
    gates = sorted(set.intersection(*map(set, turned)), key=float, reverse=True)
    path = []
    for scores in [line.rows, *([own[gate] for own in turned] for gate in gates)]:
        found = [(on_test(score), pick(score)) for score in scores]
        whole = [(test, word) for test, word in found if test is not None and word is not None]
        if len(whole) < len(found):
            break
        tests, words = zip(*whole, strict=True)
        path.append((statistics.mean(tests), statistics.mean(words)))
    return path

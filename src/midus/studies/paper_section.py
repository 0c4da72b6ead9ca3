"""Beside the paper: its order of methods and settings, ours, and where the two part."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from midus.evaluation.paper import PAPER, PaperRow
from midus.studies.figures import (
    Line,
    Pick,
    of_task,
    of_text,
    on_test,
    on_validation,
    shown_tasks,
    spread,
    tasks_mean,
    to_table,
)
from midus.studies.grid import lengths, make_trial
from midus.studies.options import StudyOptions
from midus.studies.paper_ablations import ABLATIONS
from midus.studies.paper_order import Entry, Order, Pair
from midus.studies.paper_rows import Searched, ablated, paper_name
from midus.studies.results import Row

_SMALL, _LARGE = "Llama-3.2-1B", "Llama-3.1-8B"
# Where the paper has its comparisons of methods, by the labels in its source.
_TABLES = {
    "general": {_SMALL: "tab:main_results, tab:memory_results", _LARGE: "tab:main_results"},
    "math": {_SMALL: "tab:math", _LARGE: "tab:math"},
}
_CORPORA = {"general": "FineWeb-Edu", "math": "MathPile"}
_PREFACE = (
    "The paper's figures are of other bases, other text and many more tokens, one of each and "
    "without a spread: what can be compared is order. A pair is decided where Welch's t-test over "
    "our seeds says so at 5 %, so never with one seed; of twenty pairs that do not differ one may "
    "be. Figures that are equal in the paper have no order there (Kendall's tau is tau-b)."
)
Shared = list[tuple[Line, PaperRow | None]]


@dataclass(frozen=True)
class _Theirs:
    """A figure of the paper's."""

    heading: str
    value: Callable[[PaperRow], float]
    is_loss: bool


@dataclass(frozen=True)
class _Ours:
    """The figure of ours that stands beside it."""

    heading: str
    pick: Pick
    digits: int
    is_loss: bool = True


_WIKI = _Theirs("WikiText ppl", lambda row: row.scores["wikitext"], is_loss=True)
_AVERAGE = _Theirs("average accuracy, %", lambda row: row.average, is_loss=False)
Beside = list[tuple[_Theirs, _Ours]]


def beside_the_paper(
    study: StudyOptions, lines: list[Line], searched: Searched, behind: list[str] | None = None
) -> str:
    """The section of a report; nothing for a study that names no tables of the paper.

    Args:
        study: The study.
        lines: What its methods came to.
        searched: Every trial of the search, with its row where it has ended.
        behind: Methods that did not go on to the final seeds.
    """
    if study.paper is None:
        return ""
    shown = shown_tasks(study, lines)
    found = _methods(study, lines, _beside(study, shown, "test"), behind or [])
    if study.paper == "general":
        found += _ablations(study, searched, _beside(study, {}, "validation"))
    if not found:
        found = ["No two methods or settings that have results are the paper's too."]
    return "\n\n".join(["## Beside the paper", _PREFACE, *found])


def _beside(study: StudyOptions, shown: Row, split: str) -> Beside:
    """Each figure of the paper's tables with one of ours: the same, or the nearest there is.

    Methods stand there by their final trials, settings by those of the search.
    """
    at = ""
    if both := lengths(study):
        at = f", {both[split == 'test']:,} tokens"
    in_domain = _Ours(f"{split} ppl{at}", on_test if split == "test" else on_validation, 3)
    accuracy = in_domain
    if shown and study.tasks and study.tasks.suite == study.paper and not study.tasks.names:
        accuracy = _Ours(f"tasks, mean %{at}", tasks_mean(shown), 2, is_loss=False)
    found = [(_AVERAGE, accuracy)]
    if study.paper == "math":
        return found
    text = next((name for name in study.texts if name.lower().startswith("wikitext")), None)
    if "wikitext" in shown.get("tasks", {}):
        pick = of_task(shown, "wikitext", "word_perplexity", 1)
        found.insert(0, (_WIKI, _Ours(f"WikiText-2, word ppl of the harness{at}", pick, 2)))
    elif text is not None:
        found.insert(0, (_WIKI, _Ours(f"{text}, ppl a word{at}", of_text(text), 2)))
    return found


def _methods(
    study: StudyOptions, lines: list[Line], beside: Beside, behind: list[str]
) -> list[str]:
    assert study.paper
    named = [(line, _name(study, line)) for line in lines if line.choice]
    whole = [(line, name) for line, name in named if len(line.rows) == line.num_seeds]
    parts = []
    for backbone, tables in _TABLES[study.paper].items():
        rows = {
            row.method: row
            for row in PAPER[study.paper]
            if row.backbone == backbone and row.stage.startswith("CPT")
        }
        shared: Shared = [(line, rows[name]) for line, name in whole if name in rows]
        for theirs, ours in beside:
            title = f"{theirs.heading}: {backbone} after CPT on {_CORPORA[study.paper]} ({tables})"
            parts += _comparison(title, "method", shared, theirs, ours)
    return [*parts, *_left_out(named, behind)] if parts else []


def _left_out(named: list[tuple[Line, str | None]], behind: list[str]) -> list[str]:
    """Methods of the study that no table above has, and why."""
    failed = [line.label for line, _ in named if len(line.rows) < line.num_seeds]
    other = [line.label for line, name in named if name is None and line.label not in failed]
    notes = []
    if failed:
        notes.append(f"- Left out, since a seed failed: {', '.join(failed)}.")
    if behind:
        notes.append(f"- Left out, since they have no final seeds: {', '.join(behind)}.")
    if other:
        notes.append(f"- Left out, since the paper has no such run: {', '.join(other)}.")
    return ["\n".join(notes)] if notes else []


def _name(study: StudyOptions, line: Line) -> str | None:
    assert line.choice
    seed = line.rows[0]["seed"]
    return paper_name(make_trial(study, line.choice.method, line.choice.varied, seed).options)


def _ablations(study: StudyOptions, searched: Searched, beside: Beside) -> list[str]:
    parts = []
    for ablation in ABLATIONS:
        for name in study.methods:
            lines, missing = ablated(study, searched, name, ablation)
            shared: Shared = [(line, ablation.rows.get(values)) for values, line in lines.items()]
            for theirs, ours in beside:
                title = f"{ablation.title}, {theirs.heading}: {_SMALL} ({ablation.label})"
                parts += _comparison(title, "setting", shared, theirs, ours)
            if missing:
                named = ", ".join(missing)
                parts.append(f"{ablation.title}: trials of {named} are left or failed.")
    return parts


def _comparison(title: str, thing: str, shared: Shared, theirs: _Theirs, ours: _Ours) -> list[str]:
    """One figure of the paper's beside one of ours; nothing where there are not two of ours.

    In the paper's order, best first; what it does not have comes last.
    """
    found = [(line.label, row, line.of_every_seed(ours.pick)) for line, row in shared]
    found = [(label, row, values) for label, row, values in found if values]
    sign = 1 if theirs.is_loss else -1
    found.sort(key=lambda one: (one[1] is None, sign * theirs.value(one[1]) if one[1] else 0.0))
    entries = [Entry(label, theirs.value(row), values) for label, row, values in found if row]
    if len(found) < 2 or not entries:
        return []
    order = Order(entries, theirs.is_loss, ours.is_loss)
    ranks = zip(order.paper_ranks(), order.our_ranks(), strict=True)
    columns = [thing, "paper", "rank", f"here: {ours.heading}", "rank"]
    rows = []
    for label, row, values in found:
        figure, in_paper, here = "-", "-", "-"
        if row:
            figure, (in_paper, here) = f"{theirs.value(row):.2f}", next(ranks)
        rows.append([label, figure, in_paper, spread(values, ours.digits), here])
    parts = [f"### {title}", to_table(columns, rows)]
    if lacking := [line.label for line, _ in shared if not line.of_every_seed(ours.pick)]:
        parts.append(f"Without this figure for every seed: {', '.join(lacking)}.")
    if theirs is _AVERAGE and ours.is_loss:
        parts.append(
            "The average accuracy of the paper's tasks was not measured here; perplexity of this "
            "study's text stands in."
        )
    return [*parts, *_verdict(order, thing, ours.digits)]


def _verdict(order: Order, thing: str, digits: int) -> list[str]:
    num = len(order.entries)
    if num < 2:
        return [f"One {thing} is in both, so there is no order to compare."]
    tau, pairs = order.tau(), list(order.pairs())
    counts = Counter(pair.verdict for pair in pairs)
    text = f"All {num} {thing}s are equal in one of the two, so there is no Kendall's tau"
    if tau is not None:
        text = f"Kendall's tau {tau:.2f} over {num} {thing}s"
    tied = f", {counts['tied']} equal in the paper" if counts["tied"] else ""
    text += (
        f"; {len(pairs)} pairs: {counts['agree']} agree, {counts['disagree']} disagree, "
        f"{counts['undecided']} undecided{tied}."
    )
    notes = [
        f"- {pair.ahead.label} is ahead of {pair.behind.label} here "
        f"({pair.ahead.mean:.{digits}f} against {pair.behind.mean:.{digits}f}), behind it in the "
        f"paper ({pair.ahead.paper:.2f} against {pair.behind.paper:.2f})."
        for pair in pairs
        if pair.verdict == "disagree"
    ]
    doubtful = [pair for pair in pairs if pair.verdict == "undecided" and pair.is_reversed]
    notes += _undecided([pair for pair in doubtful if not pair.has_one_seed], "")
    notes += _undecided([pair for pair in doubtful if pair.has_one_seed], " (one seed)")
    return [text, "\n".join(notes)] if notes else [text]


def _undecided(pairs: list[Pair], why: str) -> list[str]:
    if not pairs:
        return []
    named = "; ".join(f"{pair.ahead.label} ahead of {pair.behind.label}" for pair in pairs)
    return [f"- Undecided{why}, the other way round in the paper: {named}."]

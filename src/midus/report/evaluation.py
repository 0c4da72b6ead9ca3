"""The section on evaluation: a table for every suite, all models in it, the paper's rows apart."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from midus.report.collect import Subject
from midus.report.conditions import conditions_of
from midus.report.document import Cell, Content, Part, Row, Section, Table
from midus.report.numbers import MISSING, count, decimal, is_number
from midus.report.results import Result, is_same_model, named_model, reading

# One number of a suite: task, metric, shots. Files of one suite may hold different ones.
Key = tuple[str, str, int]
_AVERAGE = "average"


@dataclass(frozen=True)
class Average:
    """What a file's average counts. Older files give the suite's tasks, newer ones the measured."""

    label: str
    over: tuple[str, ...]
    """As the file has them."""
    counted: tuple[str, ...]
    """The measured ones among them, variants by their own names."""
    variants: dict[str, str]
    """Those that stand for another task, and which."""

    @property
    def metric(self) -> str:
        apart = f", with {', '.join(self.variants)}" if self.variants else ""
        return f"mean of {len(self.over)}{apart}"

    @property
    def key(self) -> Key:
        return _AVERAGE, f"{self.label}, {self.metric}", 0

    @property
    def is_the_papers(self) -> bool:
        """Whether it counts what the paper's average counts."""
        return len(self.counted) == len(self.over) and not self.variants


@dataclass(frozen=True)
class Measured:
    """One model's row of one file."""

    label: str
    row: dict[str, Any]
    result: Result
    scores: dict[Key, dict[str, Any]]


def evaluation_section(subjects: list[Subject]) -> Section:
    """A child section for every suite; results with different limits are kept apart."""
    results = list({id(r): r for subject in subjects for r in subject.of_kind("eval")}.values())
    suites: dict[tuple[Any, Any], list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda r: str(r.values.get("date")), reverse=True):
        with reading(result):
            suites[result.values["suite"], result.values.get("limit")].append(result)
    children = [
        Section(_title(suite, limit), _suite(found, subjects))
        for (suite, limit), found in suites.items()
    ]
    return Section("Evaluation", [], children)


def _title(suite: Any, limit: Any) -> str:
    name = f"Suite {suite}" if suite else "Chosen tasks"
    return name if limit is None else f"{name}, at most {count(limit)} documents a task"


def _suite(results: list[Result], subjects: list[Subject]) -> list[Content]:
    columns: dict[Key, dict[str, Any]] = {}
    measured: list[Measured] = []
    for result in results:
        with reading(result):
            found, rows = _read(result, subjects)
            columns = {**found, **columns}
            measured += rows
    kept, older = _newest(measured)
    # The averages come last, wherever the files have them.
    keys = sorted(columns, key=lambda key: key[0] == _AVERAGE)
    parts = [Part(_rows(kept, keys, columns)), *_paper(results, keys)]
    table = Table(
        "Scores",
        ["model", *(_heading(columns[key]) for key in keys)],
        parts,
        _notes(results, kept, columns, has_paper=len(parts) > 1, older=older),
    )
    shown = []
    for result in results:
        if names := [item.label for item in kept if item.result is result]:
            shown.append(conditions_of(f"The scores of {', '.join(names)}", result.values))
    return [table, *shown]


def _read(
    result: Result, subjects: list[Subject]
) -> tuple[dict[Key, dict[str, Any]], list[Measured]]:
    """The columns and the rows of one file."""
    given = [_column(column) for column in result.values["columns"]]
    by_task = {column["task"]: _key(column) for column in given}
    columns = {_key(column): column for column in given}
    average = _average(result)
    if average:
        columns[average.key] = _average_column(average, given)
    measured = []
    for row in result.values["rows"]:
        scores = {by_task[task]: dict(score) for task, score in row["scores"].items()}
        if average:
            scores[average.key] = {"value": row.get("average")}
        measured.append(Measured(_label(row, subjects), row, result, scores))
    return columns, measured


def _column(given: dict[str, Any]) -> dict[str, Any]:
    needed = ("task", "label", "metric", "higher_is_better", "percent")
    optional = ("shots", "variant_of")
    return {name: given[name] for name in needed} | {name: given.get(name) for name in optional}


def _key(column: dict[str, Any]) -> Key:
    return str(column["task"]), str(column["metric"]), int(column.get("shots") or 0)


def _average(result: Result) -> Average | None:
    given = result.values.get("average")
    if not given:
        return None
    originals = _measured_tasks(result)
    stands_in = {original: task for task, original in originals.items() if original}
    over = tuple(str(task) for task in given["over"])
    found = [task if task in originals else stands_in.get(task) for task in over]
    counted = tuple(task for task in found if task)
    variants = {task: original for task in counted if (original := originals[task])}
    return Average(str(given["label"]), over, counted, variants)


def _measured_tasks(result: Result) -> dict[str, str | None]:
    """The tasks of a file, each with the task it is a variant of."""
    return {column["task"]: column.get("variant_of") for column in result.values["columns"]}


def _average_column(average: Average, columns: list[dict[str, Any]]) -> dict[str, Any]:
    over = [column for column in columns if column["task"] in average.counted]
    return _column(
        {
            "task": _AVERAGE,
            "label": average.label,
            "metric": average.metric,
            "higher_is_better": all(column["higher_is_better"] for column in over),
            "percent": all(column["percent"] for column in over),
        }
    )


def _label(row: dict[str, Any], subjects: list[Subject]) -> str:
    for subject in subjects:
        if subject.source and is_same_model(named_model(row), subject.model_id, subject.source):
            return subject.label
    return str(row["model"])


def _newest(measured: list[Measured]) -> tuple[list[Measured], int]:
    """The rows, newest file first, without older ones of the same model, type and tasks."""
    kept: dict[Any, Measured] = {}
    for item in measured:
        found_id, name = named_model(item.row)
        identity = (found_id or name, str(item.row.get("dtype")), frozenset(item.scores))
        kept.setdefault(identity, item)
    return list(kept.values()), len(measured) - len(kept)


def _heading(column: dict[str, Any]) -> Cell:
    arrow = "↑" if column["higher_is_better"] else "↓"
    shots = column["shots"]
    setting = f"{column['metric']} {arrow}" + ("" if shots is None else f", {shots}-shot")
    return Cell(str(column["label"]), note=setting)


def _rows(
    measured: list[Measured], keys: list[Key], columns: dict[Key, dict[str, Any]]
) -> list[Row]:
    """The measured models; the best number of a column is marked where there are several."""
    best = {key: _best([item.scores.get(key) for item in measured], columns[key]) for key in keys}
    rows: list[Row] = []
    for item in measured:
        row: Row = [item.label]
        for key in keys:
            score = item.scores.get(key, {})
            value: Any = score.get("value")
            stderr: Any = score.get("stderr")
            scale = 100 if columns[key]["percent"] else 1
            text = decimal(value * scale) if is_number(value) else MISSING
            note = f"± {decimal(stderr * scale)}" if is_number(stderr) else ""
            row.append(Cell(text, note, is_best=is_number(value) and value == best[key]))
        rows.append(row)
    return rows


def _best(scores: list[dict[str, Any] | None], column: dict[str, Any]) -> float | None:
    values = [score["value"] for score in scores if score and is_number(score.get("value"))]
    if len(values) < 2:
        return None
    best: float = max(values) if column["higher_is_better"] else min(values)
    return best


def _paper(results: list[Result], keys: list[Key]) -> list[Part]:
    """The paper's rows, a part for each backbone and stage; its numbers are printed as they are."""
    groups: dict[str, dict[str, dict[Key, Any]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        with reading(result):
            average = _average(result)
            # A mean over other documents, or one that was not taken, has none beside it.
            comparable = average.key if average and average.is_the_papers else None
            for row in result.values.get("paper") or []:
                setting = ", ".join(str(row[k]) for k in ("backbone", "stage") if row.get(k))
                values = groups[setting][str(row["method"])]
                values |= {key: row["scores"].get(key[0]) for key in keys if key[0] != _AVERAGE}
                if comparable:
                    values[comparable] = row.get("average")
    parts = []
    for setting, methods in groups.items():
        rows: list[Row] = [
            [method, *(decimal(values.get(key)) for key in keys)]
            for method, values in methods.items()
        ]
        title = f"The paper's numbers, not measured here: {setting}".rstrip(": ")
        parts.append(Part(rows, title))
    return parts


def _missing(result: Result, average: Average | None) -> list[str]:
    """What could not be measured, and what the average asks for and was not."""
    measured = {task for pair in _measured_tasks(result).items() for task in pair}
    wanted = [*(result.values.get("missing") or []), *(average.over if average else ())]
    return [task for task in dict.fromkeys(map(str, wanted)) if task not in measured]


def _notes(
    results: list[Result],
    kept: list[Measured],
    columns: dict[Key, dict[str, Any]],
    has_paper: bool,
    older: int,
) -> list[str]:
    notes = ["↑ higher is better, ↓ lower is better; ± is one standard error."]
    if len(kept) > 1:
        notes.append("Bold: the best of the measured models, whatever the standard errors.")
    if has_paper:
        notes.append(
            "The paper's rows are printed as it has them; other models, data and hardware."
        )
    for result in results:
        who = ", ".join(item.label for item in kept if item.result is result)
        if not who:
            continue
        with reading(result):
            average = _average(result)
            missing = _missing(result, average)
        if missing:
            notes.append(f"Partial: {', '.join(missing)} not measured for {who}.")
        if average and average.variants:
            pairs = " and ".join(f"{new} for {old}" for new, old in average.variants.items())
            notes.append(f"{average.label} counts {pairs}, for {who}.")
    for column in columns.values():
        if original := column["variant_of"]:
            notes.append(f"{column['label']}: other documents than those of {original}.")
    documents = {
        str(columns[key]["label"]): score["num_docs"]
        for item in kept
        for key, score in item.scores.items()
        if score.get("num_docs")
    }
    if documents:
        counts = ", ".join(f"{label} {count(num)}" for label, num in documents.items())
        notes.append(f"Documents scored: {counts}.")
    types = {str(item.row["dtype"]) for item in kept if item.row.get("dtype")}
    if types:
        notes.append(f"Weights in {' and '.join(sorted(types))}.")
    if older:
        notes.append(f"{older} older rows of the same models and tasks are left out.")
    return notes

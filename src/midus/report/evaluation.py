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
    average, key = result.values.get("average"), None
    if average:
        key = (_AVERAGE, str(average["label"]), len(average["over"]))
        columns[key] = _average_column(average, given)
    measured = []
    for row in result.values["rows"]:
        scores = {by_task[task]: dict(score) for task, score in row["scores"].items()}
        if key:
            scores[key] = {"value": row.get("average")}
        measured.append(Measured(_label(row, subjects), row, result, scores))
    return columns, measured


def _column(given: dict[str, Any]) -> dict[str, Any]:
    needed = ("task", "label", "metric", "higher_is_better", "percent")
    optional = ("shots", "variant_of")
    return {name: given[name] for name in needed} | {name: given.get(name) for name in optional}


def _key(column: dict[str, Any]) -> Key:
    return str(column["task"]), str(column["metric"]), int(column.get("shots") or 0)


def _average_column(average: dict[str, Any], columns: list[dict[str, Any]]) -> dict[str, Any]:
    over = [column for column in columns if column["task"] in average["over"]]
    return _column(
        {
            "task": _AVERAGE,
            "label": average["label"],
            "metric": f"mean of {len(average['over'])}",
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
        identity = (
            item.row.get("model_id") or item.row.get("model"),
            item.row.get("dtype"),
            frozenset(item.scores),
        )
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
    groups: dict[str, dict[str, Row]] = defaultdict(dict)
    for result in results:
        with reading(result):
            for row in result.values.get("paper") or []:
                setting = ", ".join(str(row[k]) for k in ("backbone", "stage") if row.get(k))
                values = {**row["scores"], _AVERAGE: row.get("average")}
                cells = [decimal(values.get(task)) for task, *_ in keys]
                groups[setting][str(row["method"])] = [str(row["method"]), *cells]
    return [
        Part(list(rows.values()), f"The paper's numbers, not measured here: {setting}".rstrip(": "))
        for setting, rows in groups.items()
    ]


def _missing(result: Result) -> list[str]:
    """What could not be measured, and what the average asks for and was not."""
    measured = {column["task"] for column in result.values["columns"]}
    averaged = (result.values.get("average") or {}).get("over", [])
    wanted = [*(result.values.get("missing") or []), *averaged]
    return [str(task) for task in dict.fromkeys(wanted) if task not in measured]


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
        if who and (missing := _missing(result)):
            notes.append(f"Partial: {', '.join(missing)} not measured for {who}.")
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

"""Scores side by side: which is best, what is averaged, and what may not be."""

from dataclasses import dataclass
from typing import Any

from midus.evaluation.evaluate import ModelScores, Selection
from midus.evaluation.paper import PaperRow
from midus.evaluation.suites import Mean


@dataclass(frozen=True)
class Cell:
    """One number of the table, or nothing."""

    value: float | None
    stderr: float | None = None
    is_best: bool = False

    def text(self, percent: bool) -> str:
        if self.value is None:
            return "-"
        scale = 100 if percent else 1
        error = f" ±{scale * self.stderr:.2f}" if self.stderr is not None else ""
        return f"{scale * self.value:.2f}{error}"


@dataclass(frozen=True)
class Line:
    """One row of the table: a task or a mean, over all models."""

    key: str
    label: str
    metric: str
    shots: int | None
    percent: bool
    higher_is_better: bool
    cells: tuple[Cell, ...]
    paper: tuple[float | None, ...]


def make_lines(
    selection: Selection, models: list[ModelScores], paper: list[PaperRow]
) -> list[Line]:
    """The table, line by line; a mean that lacks one of its parts has no value.

    Args:
        selection: What was measured.
        models: The models' scores.
        paper: Rows of the paper to show beside them.
    """
    lines = []
    for column in selection.columns:
        scores = [model.scores[column.key] for model in models]
        lines.append(
            Line(
                column.key,
                column.label,
                column.metric,
                column.shots,
                column.percent,
                column.higher_is_better,
                _cells([(s["value"], s["stderr"]) for s in scores], column.higher_is_better),
                # Other documents than the paper's have no number of the paper beside them.
                tuple(None if column.variant_of else row.scores.get(column.key) for row in paper),
            )
        )
    suite = selection.suite
    for mean in (*suite.categories, *([suite.average] if suite.average else [])):
        lines.append(_mean_line(mean, selection, models, paper))
    return lines


def mean_of(mean: Mean, selection: Selection, model: ModelScores) -> float | None:
    """A plain mean over columns, or None where one of them was not measured."""
    keys = _measured_keys(mean, selection)
    if keys is None:
        return None
    values = [model.scores[key]["value"] for key in keys]
    assert all(value is not None for value in values)
    return sum(float(value or 0) for value in values) / len(values)


def eval_document(
    selection: Selection,
    models: list[ModelScores],
    paper: list[PaperRow],
    limit: int | None,
) -> dict[str, Any]:
    """The table as the JSON that the report reads."""
    suite = selection.suite
    columns = [
        {
            "task": column.key,
            "label": column.label,
            "metric": column.metric,
            "higher_is_better": column.higher_is_better,
            "percent": column.percent,
            "shots": column.shots,
            "variant_of": column.variant_of,
        }
        for column in selection.columns
    ]
    rows = []
    for model in models:
        scores: dict[str, Any] = dict(model.scores)
        for mean in suite.categories:
            scores[mean.label] = {
                "value": mean_of(mean, selection, model),
                "stderr": None,
                "num_docs": None,
            }
        average = mean_of(suite.average, selection, model) if suite.average else None
        rows.append(
            {
                "model": model.model,
                "model_id": model.model_id,
                "dtype": model.dtype,
                "scores": scores,
                "average": average,
            }
        )
    for mean in suite.categories:
        columns.append(
            {
                "task": mean.label,
                "label": mean.label,
                "metric": "mean",
                "higher_is_better": True,
                "percent": True,
                "shots": None,
                "variant_of": None,
            }
        )
    keys = _measured_keys(suite.average, selection) if suite.average else None
    over = keys or (list(suite.average.over) if suite.average else [])
    comparable = keys is not None and not _has_variants(keys, selection)
    return {
        "suite": suite.name,
        "limit": limit,
        "columns": columns,
        "average": suite.average and {"label": suite.average.label, "over": over},
        "missing": list(selection.missing),
        "rows": rows,
        "paper": [
            {
                "method": row.method,
                "backbone": row.backbone,
                "stage": row.stage,
                "scores": row.scores,
                "average": row.average if comparable else None,
            }
            for row in paper
        ],
    }


def _mean_line(
    mean: Mean, selection: Selection, models: list[ModelScores], paper: list[PaperRow]
) -> Line:
    keys = _measured_keys(mean, selection)
    values: list[tuple[float | None, float | None]] = [
        (mean_of(mean, selection, model), None) for model in models
    ]
    is_average = selection.suite.average is not None and mean.label == selection.suite.average.label
    comparable = keys is not None and not _has_variants(keys, selection)
    printed = tuple(
        None if not comparable else row.average if is_average else row.scores.get(mean.label)
        for row in paper
    )
    return Line(mean.label, mean.label, "mean", None, True, True, _cells(values, True), printed)


def _measured_keys(mean: Mean, selection: Selection) -> list[str] | None:
    by_key = {column.variant_of or column.key: column.key for column in selection.columns}
    keys = [by_key.get(key) for key in mean.over]
    return None if None in keys else [key for key in keys if key]


def _has_variants(keys: list[str], selection: Selection) -> bool:
    variants = {column.key for column in selection.columns if column.variant_of}
    return bool(variants.intersection(keys))


def _cells(
    values: list[tuple[float | None, float | None]], higher_is_better: bool
) -> tuple[Cell, ...]:
    known = [value for value, _ in values if value is not None]
    best = (max if higher_is_better else min)(known) if len(values) > 1 and known else None
    return tuple(Cell(value, error, value is not None and value == best) for value, error in values)

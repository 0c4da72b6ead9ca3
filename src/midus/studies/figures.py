"""Figures of a study's trials: which there are, over the seeds of a setting, and how written."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from midus.studies.choosing import Choice
from midus.studies.options import StudyOptions
from midus.studies.results import Row

Pick = Callable[[Row], float | None]


@dataclass(frozen=True)
class Line:
    """One method or setting in a table."""

    label: str
    choice: Choice | None
    """What its search came to; None for the untouched base, and for a setting by itself."""
    rows: list[Row]
    """The setting's trials that are done, one a seed."""
    num_seeds: int = 1
    """Trials there were, those that failed included."""

    def values(self, pick: Pick) -> list[float]:
        """A figure of every seed that has it."""
        found = [pick(row) for row in self.rows]
        return [value for value in found if value is not None]

    def of_every_seed(self, pick: Pick) -> list[float]:
        """A figure of all seeds; nothing where one has none, as others may be the lucky ones."""
        values = self.values(pick)
        return values if len(values) == len(self.rows) else []


def on_validation(row: Row) -> float | None:
    """Perplexity a token of validation text."""
    return _perplexity(row.get("validation"))


def on_test(row: Row) -> float | None:
    """Perplexity a token of test text."""
    return _perplexity(row.get("test"))


def peak_gb(row: Row) -> float | None:
    """Most GPU memory tensors took, in GB."""
    value: float | None = row.get("peak_gb")
    return value


def of_text(name: str) -> Pick:
    """Perplexity a word of one of the study's texts."""

    def pick(row: Row) -> float | None:
        value: float | None = row["texts"].get(name, {}).get("word_perplexity")
        return value

    return pick


def shown_tasks(study: StudyOptions, lines: list[Line]) -> Row:
    """A row with the tasks a table shows: the base's, which is measured anew for other tasks."""
    rows = [row for line in reversed(lines) for row in line.rows if row.get("tasks")]
    return rows[0] if study.tasks and rows else {}


def of_task(shown: Row, name: str | None, metric: str, scale: int) -> Pick:
    """A figure of a task, or of a row's tasks together, where they are those that are shown.

    Args:
        shown: As `shown_tasks` gives it.
        name: The task; None for the row itself.
        metric: Its figure.
        scale: What the figure is multiplied by.
    """

    def pick(row: Row) -> float | None:
        if row.get("tasks_of") != shown["tasks_of"]:
            return None
        value = (row["tasks"][name] if name else row)[metric]
        return None if value is None else scale * value

    return pick


def tasks_mean(shown: Row) -> Pick:
    """The mean over tasks, in percent."""
    return of_task(shown, None, "tasks_mean", 100)


def missing_tasks(rows: Iterable[tuple[str, list[Row]]], shown: Row) -> list[str]:
    """Notes on methods, by label, some of whose rows have no scores of the tasks that are shown."""
    notes = []
    for label, own in rows if shown else []:
        found = [row for row in own if row.get("tasks_of") == shown["tasks_of"]]
        if lacking := len(own) - len(found):
            notes.append(f"- {label}: {lacking} of {len(own)} seeds have no scores of these tasks.")
        errors = {n: s["error"] for row in found for n, s in row["tasks"].items() if "error" in s}
        notes += [f"- {label}: {name} failed ({why})." for name, why in errors.items()]
    return notes


def spread(values: list[float], digits: int) -> str:
    """A mean, with the standard deviation where there is more than one value."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):,.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):,.{digits}f}"


def to_table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, all but the first column to the right."""
    rule = ["---", *["---:" for _ in columns[1:]]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, rule, *rows])


def _perplexity(score: Any) -> float | None:
    value: float | None = score["perplexity"] if score else None
    return value

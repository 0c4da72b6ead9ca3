"""Figures of a study's trials: which there are, over the seeds of a setting, and how written."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from midus.studies.choosing import Choice
from midus.studies.grid import lengths
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


def tokens_read(row: Row) -> int:
    """Tokens that a trial trains on: whole steps."""
    options = row["options"]
    num = options["trainer"]["max_steps"] * options["batch_size"] * options["data"]["seq_len"]
    return int(num)


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


def task_columns(shown: Row) -> dict[str, Pick]:
    """By heading: a column a task, and their mean; nothing without tasks."""
    columns: dict[str, Pick] = {}
    has_shares = False
    for name, scores in shown.get("tasks", {}).items():
        metric = next(key for key in scores if key not in ("stderr", "n", "error"))
        is_share = "perplexity" not in metric and metric != "bits_per_byte"
        heading = f"{name}, {metric} %" if is_share else f"{name}, {metric}"
        columns[heading] = of_task(shown, name, metric, 100 if is_share else 1)
        has_shares = has_shares or is_share
    if has_shares:
        columns["tasks, mean %"] = tasks_mean(shown)
    return columns


def about_tasks(study: StudyOptions) -> str:
    """A sentence on what a study's tasks are, behind a space; nothing without tasks."""
    if study.tasks is None:
        return ""
    limit = study.tasks.limit
    much = "all examples of each" if limit is None else f"at most the first {limit:,} of each"
    return f" Tasks are those of lm-evaluation-harness, {much}."


def about_lengths(study: StudyOptions) -> str:
    """A sentence on trials of two lengths, behind a space; nothing where all are as long."""
    both = lengths(study)
    if both is None:
        return ""
    return (
        f" In the study settings were chosen in trials of {both[0]:,} tokens, and final models "
        f"read {both[1]:,}."
    )


def said_of_texts_and_tasks(row: Row) -> list[str]:
    """A row's perplexity of texts and its mean over tasks, as words for a line of progress."""
    words = [
        f"{name} {scores['word_perplexity']:.2f} a word"
        for name, scores in row["texts"].items()
        if scores["word_perplexity"] is not None
    ]
    if row.get("tasks_mean") is not None:
        words.append(f"tasks {100 * row['tasks_mean']:.2f} %")
    return words


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

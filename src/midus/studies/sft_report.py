"""Fine-tuned finalists as a Markdown page: a line a method, mean and spread over its models."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from midus.studies.figures import (
    Pick,
    about_lengths,
    about_tasks,
    missing_tasks,
    of_text,
    on_test,
    spread,
    task_columns,
    to_table,
)
from midus.studies.finalists import Finalist, find_finalists
from midus.studies.folder import read_study_folder
from midus.studies.options import StudyOptions
from midus.studies.results import Row
from midus.studies.sft_options import FOLDER, Sft, read_sft
from midus.studies.sft_rows import read_rows
from midus.training.checkpoint import replace_text

REPORT_NAME = "report.md"


@dataclass(frozen=True)
class SftLine:
    """One method in the table."""

    label: str
    rows: list[Row]
    """Of its models that have been fine-tuned."""
    origins: list[Row]
    """The study's rows of the same models."""
    num_models: int
    """Models that the study has kept of it."""


@dataclass(frozen=True)
class SftReport:
    """What can be told of a fine-tuning so far."""

    study: StudyOptions
    sft: Sft
    lines: list[SftLine]
    """By held-out loss after fine-tuning, lowest first."""
    missing: list[tuple[str, int]]
    """Label and number of the models that are left, a method each: labels may be alike."""
    num_others: int
    """Rows of models that are no finalists any more."""


def make_sft_report(folder: Path, name: str) -> SftReport:
    """Reads what has been fine-tuned under a name; the folder is the study's."""
    study, identity = read_study_folder(folder)
    sft, rows = read_sft(folder, name), read_rows(folder, name)
    groups: dict[str, list[Finalist]] = {}
    for finalist in find_finalists(folder, study, identity):
        groups.setdefault(finalist.method, []).append(finalist)
    lines, missing, shown = [], [], set()
    for own in groups.values():
        label = own[0].label
        ended = [finalist for finalist in own if sft.key(finalist) in rows]
        found = [rows[sft.key(finalist)] for finalist in ended]
        shown |= {row["key"] for row in found}
        if found:
            origins = [finalist.row for finalist in ended]
            lines.append(SftLine(label, found, origins, len(own)))
        if len(found) < len(own):
            missing.append((label, len(own) - len(found)))
    lines.sort(key=_loss_after)
    return SftReport(study, sft, lines, missing, len(rows.keys() - shown))


def to_markdown(report: SftReport) -> str:
    """The page: what was done, the table, and what is left."""
    columns = _columns(report)
    cells = [[cell(line) for cell in columns.values()] for line in report.lines]
    title = f"# {report.study.name}: {report.sft.name}"
    parts = [title, _preface(report), to_table(list(columns), cells)]
    if notes := _notes(report):
        parts.append("\n".join(notes))
    return "\n\n".join(parts) + "\n"


def write_sft_report(folder: Path, name: str) -> tuple[Path, str]:
    """Writes ``report.md`` beside the results, and gives its path and text."""
    path = folder / FOLDER / name / REPORT_NAME
    text = to_markdown(make_sft_report(folder, name))
    replace_text(path, text)
    return path, text


def _preface(report: SftReport) -> str:
    options = report.sft.options
    optimizer = options["optimizer"]
    rows = [row for line in report.lines for row in line.rows]
    steps = ", ".join(sorted({f"{row['steps']:,}" for row in rows})) or "no"
    machines = ", ".join(sorted({row["hardware"] for row in rows})) or "no machine yet"
    commits = ", ".join(sorted({str(row["conditions"]["commit"]) for row in rows})) or "none"
    return (
        "The base and every final model that the study kept, fine-tuned with the same options: "
        f"rows, their order, {steps} steps of {options['batch_size']:,} examples and rates (at "
        f"most {optimizer['lr']:g}; keys and values of memories {optimizer['memory_lr']:g}) are "
        "the same for all, and no rate was searched for any method. All weights train."
        f"{about_lengths(report.study)} Held-out loss is of answers to instructions, before → "
        "after; test text, other texts and tasks are the study's, as it measured them → after "
        "fine-tuning. Means over the study's seeds ± "
        f"their standard deviation; by held-out loss.{about_tasks(report.study)} On {machines}; "
        f"commit {commits}."
    )


def _columns(report: SftReport) -> dict[str, Callable[[SftLine], str]]:
    """Every heading with what stands below it."""
    columns: dict[str, Callable[[SftLine], str]] = {
        "method": lambda line: line.label,
        "trained, M": lambda line: f"{line.rows[0]['trainable'] / 1e6:.4g}",
        "models": _models,
        "held-out loss": lambda line: " → ".join(
            spread(_of_all(line.rows, _loss(when)), 4) for when in ("before", "after")
        ),
        "test ppl": _before_and_after(on_test, 3),
        **{f"{n}, ppl a word": _before_and_after(of_text(n), 2) for n in report.study.texts},
    }
    columns |= {
        heading: _before_and_after(pick)
        for heading, pick in task_columns(_shown_tasks(report)).items()
    }
    return columns | {
        "tokens": lambda line: f"{statistics.mean(row['tokens'] for row in line.rows):,.0f}",
        "seconds": lambda line: spread(_of_all(line.rows, lambda row: row["seconds"]), 0),
    }


def _models(line: SftLine) -> str:
    num = len(line.rows)
    return str(num) if num == line.num_models else f"{num} of {line.num_models}"


def _loss(when: str) -> Pick:
    def pick(row: Row) -> float | None:
        value: float | None = row["held_out"][when]["loss"]
        return value

    return pick


def _loss_after(line: SftLine) -> float:
    values = _of_all(line.rows, _loss("after"))
    return statistics.mean(values) if values else math.inf


def _before_and_after(pick: Pick, digits: int = 2) -> Callable[[SftLine], str]:
    """As the study measured the models, and after fine-tuning."""

    def cell(line: SftLine) -> str:
        return " → ".join(spread(_of_all(rows, pick), digits) for rows in (line.origins, line.rows))

    return cell


def _of_all(rows: list[Row], pick: Pick) -> list[float]:
    """A figure of all models; nothing where one has none, as others may be the lucky ones."""
    values = [pick(row) if row else None for row in rows]
    found = [value for value in values if value is not None]
    return found if len(found) == len(rows) else []


def _shown_tasks(report: SftReport) -> Row:
    """A row with the tasks that the table shows; nothing without tasks."""
    rows = [row for line in report.lines for row in line.rows if row.get("tasks")]
    return rows[0] if rows else {}


def _notes(report: SftReport) -> list[str]:
    notes = [
        f"- {label}: {num} of the models that the study kept {'is' if num == 1 else 'are'} left."
        for label, num in report.missing
    ]
    notes += missing_tasks(((line.label, line.rows) for line in report.lines), _shown_tasks(report))
    if report.num_others:
        notes.append(
            f"- {report.num_others} rows are of models that the study has chosen no longer, and "
            "are not shown."
        )
    return notes

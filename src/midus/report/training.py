"""The section on training: curves, what a run came to, its settings."""

import json
from statistics import median
from typing import Any

from midus.report.collect import Subject
from midus.report.conditions import conditions_of
from midus.report.curves import training_charts
from midus.report.document import Content, Part, Row, Section, Source, Table
from midus.report.numbers import count, decimal, duration, plain
from midus.report.runs import Run

_SETTINGS = {
    "stage": "stage",
    "model": "starts from",
    "control": "control",
    "data.seq_len": "sequence length",
    "batch_size": "sequences a step",
    "optimizer.recipe": "recipe",
    "optimizer.lr": "learning rate",
    "optimizer.relative_lr": "learning rate, relative to the size of the base's weights",
    "optimizer.memory_lr": "learning rate of keys and values",
    "optimizer.weight_decay": "weight decay",
    "optimizer.schedule": "schedule",
    "precision": "precision",
    "seed": "seed",
}


def training_section(subjects: list[Subject]) -> Section:
    """Everything about the runs among the subjects; empty without any."""
    runs = [(subject.label, subject.run) for subject in subjects if subject.run]
    if not runs:
        return Section("Training")
    content: list[Content] = [_outcome(runs), *training_charts(runs)]
    for label, run in runs:
        if run.result:
            found = run.result.get("conditions")
            conditions = {
                **(found if isinstance(found, dict) else {}),
                "hardware": run.result.get("hardware"),
            }
            content.append(conditions_of(f"The run {label}", conditions))
    children = [Section("Settings", _settings(runs))]
    return Section("Training", content, children)


def _outcome(runs: list[tuple[str, Run]]) -> Table:
    columns = [_outcome_of(run) for _, run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows: list[Row] = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return Table("What training came to", ["", *(label for label, _ in runs)], [Part(rows)])


def losses_of(run: Run, name: str) -> tuple[float | None, float | None]:
    """Held-out ``loss`` or ``perplexity`` before and after; of an unfinished run, so far."""
    if run.result:
        return run.result.get(f"before_{name}"), run.result.get(f"after_{name}")
    logged = run.curve(f"eval_{name}")
    before = next((value for step, value in logged if step == 0), None)
    return before, logged[-1][1] if logged else None


def _outcome_of(run: Run) -> dict[str, str]:
    result = run.result
    outcome = {"state": "" if result else "not finished"}
    for name, digits in (("loss", 4), ("perplexity", 3)):
        for when, value in zip(("before", "after"), losses_of(run, name), strict=True):
            outcome[f"held-out {name} {when}"] = "" if value is None else decimal(value, digits)
    speeds = [speed for _, speed in run.curve("tokens_per_second")]
    memory = [size for _, size in run.curve("peak_memory_gb")]
    seconds = result.get("seconds_since_start_or_resume", result.get("seconds"))
    outcome |= {
        "steps": count(run.last("steps")),
        "tokens read": count(run.last("tokens")),
        "parameters that trained": count(result["trainable"]) if "trainable" in result else "",
        "time": duration(seconds) if seconds else "",
        "tokens per second, median": count(median(speeds)) if speeds else "",
        "peak memory": f"{max(memory):.1f} GB" if memory else "",
    }
    return {name: text for name, text in outcome.items() if text}


def _settings(runs: list[tuple[str, Run]]) -> list[Content]:
    """The settings people ask for, those in which the runs differ, and all of them, folded."""
    options = [(label, run.options) for label, run in runs if run.options]
    if not options:
        return []
    flat = [_flat(values) for _, values in options]
    differing = [
        key
        for key in dict.fromkeys(key for values in flat for key in values)
        if key not in _SETTINGS and len({plain(values.get(key)) for values in flat}) > 1
    ]
    rows: list[Row] = []
    for key in (*_SETTINGS, *differing):
        if any(key in values for values in flat):
            name = _SETTINGS.get(key, key)
            rows.append([name, *(_shown(values.get(key)) for values in flat)])
    columns: Row = ["", *(label for label, _ in options)]
    table = Table("Main settings", columns, [Part(rows)], is_text=True)
    files = [
        Source(f"All options of {label}", json.dumps(values, indent=2, ensure_ascii=False))
        for label, values in options
    ]
    return [table, *files]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else plain(value)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, list):
        values = dict(enumerate(values))
    if not isinstance(values, dict) or not values:
        return {prefix.rstrip("."): values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat

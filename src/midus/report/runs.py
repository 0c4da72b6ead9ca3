"""What a training run left in its folder: metrics.jsonl, options.json, result.json, model/."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.report.document import Point
from midus.report.numbers import is_number

METRICS_NAME = "metrics.jsonl"
OPTIONS_NAME = "options.json"
RESULT_NAME = "result.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Run:
    """A run, finished or not."""

    folder: Path
    metrics: list[dict[str, Any]]
    options: dict[str, Any]
    """Empty where the file is missing; so is the result of a run that has not ended."""
    result: dict[str, Any]

    def curve(self, key: str) -> list[Point]:
        """(step, value) of every line that has the key."""
        return [(row["step"], row[key]) for row in self.metrics if is_number(row.get(key))]

    def last(self, name: str) -> Any:
        """``steps`` or ``tokens`` of the result, or so far."""
        key = "step" if name == "steps" else name
        logged = [row[key] for row in self.metrics if key in row]
        return self.result.get(name, logged[-1] if logged else None)

    def keys(self, prefix: str) -> list[str]:
        """What stands after the prefix in the names of logged values, in their first order."""
        found = dict.fromkeys(key for row in self.metrics for key in row if key.startswith(prefix))
        return [key.removeprefix(prefix) for key in found]


def is_run(folder: Path) -> bool:
    """Whether a folder is one of a training run."""
    return (folder / METRICS_NAME).is_file() or (folder / OPTIONS_NAME).is_file()


def read_run(folder: Path) -> Run:
    """Reads what is there."""
    run = Run(
        folder=folder,
        metrics=read_metrics(folder / METRICS_NAME),
        options=_read_object(folder / OPTIONS_NAME),
        result=_read_object(folder / RESULT_NAME),
    )
    if not run.metrics and not run.result and model_folder(folder) is None:
        raise MidusError(
            f"{folder} is a run that has neither metrics nor a model yet; wait for its first log"
        )
    return run


def model_folder(run: Path) -> Path | None:
    """The run's model, or its newest checkpoint while it has none."""
    checkpoints = [
        (int(match[1]), path)
        for path in run.glob("checkpoint-*")
        if (match := _CHECKPOINT.fullmatch(path.name))
    ]
    newest_first = [path for _, path in sorted(checkpoints, reverse=True)]
    for folder in (run / "model", *newest_first):
        if (folder / "config.json").is_file():
            return folder
    return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that a kill cut short is left out."""
    if not path.is_file():
        return []
    *lines, last = read_text(path).split("\n")  # after the last line there is nothing
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise MidusError(
                f"{path}, line {number} is not JSON ({error}); mend or remove the line"
            ) from error
        if not isinstance(row, dict) or not is_number(row.get("step")):
            raise MidusError(
                f"{path}, line {number} is no object with a step; mend or remove the line"
            )
        rows.append(row)
    try:
        row = json.loads(last)
        return [*rows, row] if isinstance(row, dict) and is_number(row.get("step")) else rows
    except ValueError:
        return rows


def read_text(path: Path) -> str:
    """A file as UTF-8, or a sentence that says why not."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MidusError(f"{path} cannot be read ({error}); fetch or write it again") from error


def read_json(path: Path) -> Any:
    """The value of a JSON file, or a sentence that says why not."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, MidusError):
            raise
        raise MidusError(f"{path} is not JSON ({error}); fetch or write it again") from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = read_json(path)
    if not isinstance(values, dict):
        raise MidusError(f"{path} holds no JSON object; fetch or write it again")
    return values

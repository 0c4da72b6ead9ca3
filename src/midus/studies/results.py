"""Results of a study on disk: one JSON line a trial, each written whole and synced.

Lines of several machines can be put into one file: a trial is known by its key. The first line of
a key that is done counts; later ones say where its model is kept, how it does on tasks, and
how fast it is where that is not known yet.
"""

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock

from midus.errors import MidusError
from midus.models.weights import fsync
from midus.reports import finite
from midus.studies.trials import UNTOUCHED, trial_key
from midus.training.options import TrainOptions

RESULTS_NAME = "results.jsonl"
_LOCK_NAME = ".writing"
Row = dict[str, Any]
# What every line has, whatever became of its trial; and what one that is done has besides.
_FIELDS = ["key", "identity", "method", "setting", "seed", "status", "options"]
_FIELDS += ["hardware", "conditions"]
_DONE_FIELDS = ["validation", "test", "texts", "trainable"]
# What a later line of the same key may add.
_ADDED = ("model", "tasks", "tasks_mean", "tasks_of")
# What it may add where there is no speed yet: the speed, and what that was measured of.
_SPEED = ("tokens_per_second", "graphed", "timed_apart")


class NotWritten(MidusError):
    """Results cannot be written, so that no further trial is worth its time."""


def is_done(row: Row) -> bool:
    """Whether a trial ended with figures that are numbers."""
    splits = [row.get(name) or {} for name in ("validation", "test")]
    return row["status"] == "done" and all(split.get("loss") is not None for split in splits)


def read_results(out: Path) -> dict[str, Row]:
    """Every trial that has ended, by key; a line that a kill cut short is left out.

    A row counts under the key its options have today: an option that has been added since, and
    changes nothing unless it is set, does not make a trial another.
    """
    path = out / RESULTS_NAME
    rows: dict[str, Row] = {}
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        _check(row, f"line {number} of {path}")
        key = _key_of(row)
        rows[key] = _together(rows.get(key), row)
    return rows


def add_result(out: Path, row: Row) -> None:
    """Appends a line, after whatever a kill may have left of another."""
    path = out / RESULTS_NAME
    try:
        # Processes that share a study write one after the other.
        with FileLock(out / _LOCK_NAME), path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(finite(row), allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if not size:
            fsync(out)  # a file that is new is in its folder only then
    except OSError as error:
        raise NotWritten(f"{path} cannot be written ({error}); free some space") from error


def add_speed(out: Path, row: Row, speed: Row) -> None:
    """Appends a line that adds a speed to a row that has none, and nothing else.

    Args:
        out: Folder of the study.
        row: As `read_results` gives it.
        speed: ``tokens_per_second``, ``graphed``, and ``timed_apart``: how and where it was timed.
    """
    add_result(out, {name: row[name] for name in row if name not in _ADDED} | speed)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise MidusError(f"{path} cannot be read ({error}); move it away") from error


def _check(row: Any, where: str) -> None:
    held = row if isinstance(row, dict) else {}
    wanted = _FIELDS + (_DONE_FIELDS if held.get("status") == "done" else [])
    missing = [name for name in wanted if name not in held]
    if missing:
        raise MidusError(f"{where} is no result of a study: it has no {missing[0]}; remove it")


def _key_of(row: Row) -> str:
    if row["method"] == UNTOUCHED:
        return str(row["key"])
    try:
        return trial_key(TrainOptions.from_dict(row["options"]), row["identity"])
    except (ValueError, TypeError):  # an option that is no more
        return str(row["key"])


def _together(first: Row | None, row: Row) -> Row:
    """Two lines of one key: what was chosen by stays as it was read then."""
    if first is None or not is_done(first):
        return row
    has_speed = [own.get("tokens_per_second") is not None for own in (first, row)]
    added = (*_ADDED, *_SPEED) if has_speed == [False, True] else _ADDED
    return {**first, **{name: row[name] for name in added if name in row}}

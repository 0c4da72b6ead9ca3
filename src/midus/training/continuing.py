"""A run's folder, and whether it is the same run that goes on there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from midus.errors import MidusError
from midus.models.sources import source_id
from midus.training.checkpoint import clear_staged, last_checkpoint, replace_text
from midus.training.options import TrainOptions
from midus.training.reading import default_option

OPTIONS_NAME = "options.json"
DATA_NAME = "data.json"
MODEL_NAME = "model"
# What may change between a run and its continuation without changing its weights.
_FREE = (
    "cuda_graphs",
    "output",
    "data.cache",
    "trainer.dataloader_num_workers",
    "trainer.logging_steps",
    "trainer.per_device_eval_batch_size",
    "trainer.report_to",
    "trainer.run_name",
    "trainer.save_steps",
    "trainer.save_total_limit",
)
# What runs had that were begun without the option, where that is not today's default.
_BEFORE = {"fused_blocks": False}


def open_run(run: Path, options: TrainOptions, resume: bool) -> None:
    """Makes the run's folder, or checks that it is the same run that goes on."""
    checkpoint = last_checkpoint(run)
    saved = run / OPTIONS_NAME
    if not resume and (checkpoint or (run / MODEL_NAME).exists()):
        raise MidusError(
            f"{run} holds a run already; pass --resume to go on with it, or choose another output"
        )
    has_model = (run / MODEL_NAME).exists()
    if resume and (checkpoint or has_model) and saved.is_file():
        _refuse_other_options(_read_json(saved), options.to_dict(), run)
    if has_model and not checkpoint:
        raise MidusError(
            f"{run} holds a finished model and no checkpoint to go on from; choose another output, "
            f"or move {run / MODEL_NAME} away to train again"
        )
    run.mkdir(parents=True, exist_ok=True)
    clear_staged(run)
    replace_text(saved, json.dumps(options.to_dict(), indent=2) + "\n")


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keeps the run's folder from a second run, until this one ends or dies."""
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise MidusError(
            f"{run} is in use by another midus train; wait for it, or choose another output"
        ) from error
    except (OSError, NotImplementedError):  # a file system without locks
        yield
        return
    try:
        yield
    finally:
        lock.release()


def check_data(run: Path, identity: str, is_resumed: bool, is_main: bool) -> None:
    """Refuses to go on with other data than the run was begun with, and notes what that was.

    Args:
        run: Its folder.
        identity: Stands for all that the run reads.
        is_resumed: Whether it goes on from a checkpoint.
        is_main: Whether this process writes.
    """
    path = run / DATA_NAME
    if is_resumed and path.is_file():
        if _read_json(path).get("sha256") != identity:
            raise MidusError(
                f"{run} was begun with other data: a source has changed since; bring it back, or "
                "choose another output"
            )
    elif is_main:
        replace_text(path, json.dumps({"sha256": identity}) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise MidusError(
            f"{path} cannot be read ({error}); remove it to resume without comparing options"
        ) from error
    return values


def _refuse_other_options(old: dict[str, Any], new: dict[str, Any], run: Path) -> None:
    if changed := changed_option(old, new):
        key, before, now = changed
        raise MidusError(
            f"{run} was begun with {key}={before!r} and not {now!r}; resume with the same options, "
            "or choose another output"
        )


def changed_option(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first option, old value and new, that makes another run of it; None where there is none.

    Args:
        old: Options that a run was begun with, as it saved them.
        new: Options that it is to go on with.
    """
    before, now = deciding_options(old), deciding_options(new)
    for name in now.keys() - before.keys():
        before[name] = _BEFORE.get(name, default_option(TrainOptions, name))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            return key, before.get(key), now.get(key)
    return None


def deciding_options(values: dict[str, Any]) -> dict[str, Any]:
    """By names with dots, those that decide a run's weights.

    Args:
        values: Every option, as a run saves them.
    """
    flat = _flat(values)
    flat["model"] = source_id(flat["model"])  # one place by two names is one place
    free = set(_FREE)
    if not values.get("keep_best") and not values.get("early_stopping_patience"):
        free.add("trainer.eval_steps")
    return {name: value for name, value in flat.items() if name not in free}


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat

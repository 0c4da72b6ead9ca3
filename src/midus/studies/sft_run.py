"""One fine-tuning of one model: how it stops in time, and what it leaves in its folder."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from midus.errors import MidusError
from midus.reports import write_json
from midus.studies.timing import Deadline
from midus.training.checkpoint import last_checkpoint
from midus.training.continuing import MODEL_NAME, OPTIONS_NAME

MERGED_NAME = "start"
TASKS_NAME = "tasks.json"
_OWNER_NAME = "owner.json"


class TimeIsUp(Exception):
    """Raised out of a run whose state has been saved."""


class SftCallback(TrainerCallback, ExportableState):
    """Counts the seconds of the steps, ends with a held-out loss, and stops in time.

    Raising once a checkpoint is there leaves the run as one that is to go on; one that the trainer
    is told to stop would count as one that has ended.

    Args:
        deadline: When it stops.
        has_been_alone: Whether no other process has been on the device since this one began.
    """

    def __init__(self, deadline: Deadline, has_been_alone: Callable[[], bool]) -> None:
        self._deadline, self._has_been_alone = deadline, has_been_alone
        self._began = 0.0
        self.seconds = 0.0
        """Of all steps so far; checkpoints carry it, and the next."""
        self.was_shared = False
        """Whether others were on the device at any time, which made the steps slower."""

    def state(self) -> dict[str, Any]:
        carried = {"seconds": self.seconds, "was_shared": self.was_shared}
        return {"args": {}, "attributes": carried}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)  # its work is part of the step
        self.seconds += time.perf_counter() - self._began
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True
        elif self._deadline.is_past():
            control.should_save = True
        if control.should_save:
            self.was_shared = self.was_shared or not self._has_been_alone()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < state.max_steps and self._deadline.is_past():
            raise TimeIsUp


def open_run(run: Path, key: str, is_kept: bool) -> None:
    """Makes a run's folder ready to begin, or to go on where it has a checkpoint of this key.

    Args:
        run: The folder.
        key: Of the row it will have.
        is_kept: Whether a row names the model that is there.
    """
    if is_kept:
        raise MidusError(
            f"{run / MODEL_NAME} is the kept model of another row, so nothing else is run there; "
            "give another --name"
        )
    if _owner(run) != key or last_checkpoint(run) is None:
        shutil.rmtree(run, ignore_errors=True)
        write_json(run / _OWNER_NAME, {"key": key})
    # The owner says that it is the same run, wherever the study and its data lie meanwhile.
    (run / OPTIONS_NAME).unlink(missing_ok=True)


def end_of(run: Path) -> Path:
    """The last checkpoint of a run that has ended."""
    checkpoint = last_checkpoint(run)
    assert checkpoint is not None  # the callback has asked for it
    return checkpoint


def seconds_of(run: Path) -> float | None:
    """Of all steps of a run that has ended, whatever stopped it; None where others slowed it."""
    state = json.loads((end_of(run) / "trainer_state.json").read_text())
    carried = state["stateful_callbacks"][SftCallback.__name__]["attributes"]
    return None if carried.get("was_shared") else float(carried["seconds"])


def tidy_run(run: Path, keeps_model: bool) -> None:
    """Removes weights; options, metrics, result and picture stay."""
    left = [*run.glob("checkpoint-*"), *run.glob(".checkpoint-*"), run / MERGED_NAME]
    for folder in left if keeps_model else [*left, run / MODEL_NAME]:
        shutil.rmtree(folder, ignore_errors=True)
    for name in (_OWNER_NAME, TASKS_NAME):
        (run / name).unlink(missing_ok=True)


def _owner(run: Path) -> str | None:
    try:
        return str(json.loads((run / _OWNER_NAME).read_text())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Checkpoints of a run: written aside, synced, renamed; deltas where the base is frozen.

`checkpoint-N` is a model folder that transformers loads, with the trainer's state beside the model.
The name appears when everything is on disk, so a folder of that name is whole.
"""

import copy
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from midus.errors import MidusError
from midus.models.atomic import CONFIG_NAME, check_space
from midus.models.checkpoint import DELTA_NAME, is_inserted, write_surroundings
from midus.models.delta import base_licence, write_inserted
from midus.models.weights import Weights, fsync
from midus.training.optimizer_state import fill_state, full_state

_NAME = re.compile(r"checkpoint-(\d+)")
_ADAPTER = ".lora_"
# What safetensors, `check_space` and torch's writer say of a full disk.
_FULL = ("No space left", "the disk has", "PytorchStreamWriter")


def last_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    found = [
        (int(match[1]), path)
        for path in (run.iterdir() if run.is_dir() else [])
        if path.is_dir() and (match := _NAME.fullmatch(path.name))
    ]
    return max(found)[1] if found else None


def staged_name(target: Path) -> Path:
    """Where a checkpoint is written before it has its name; one place for all ranks."""
    return target.parent / f".{target.name}.saving"


def publish(target: Path) -> None:
    """Syncs a staged checkpoint to disk and gives it its name."""
    staged = staged_name(target)
    for path in sorted(staged.rglob("*")):
        if path.is_file():
            fsync(path)
    fsync(staged)
    if target.exists():  # the same step, saved again after a resume
        shutil.rmtree(target)
    os.rename(staged, target)
    fsync(target.parent)


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that a kill or a full disk leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.saving")
    try:
        aside.write_text(text, encoding="utf-8")
        fsync(aside)
        os.replace(aside, path)
    except OSError as error:
        raise MidusError(f"{path} cannot be written ({error}); free some space") from error


def clear_staged(run: Path) -> None:
    """Removes what killed saves left behind."""
    for left in run.glob(".checkpoint-*.saving"):
        shutil.rmtree(left, ignore_errors=True)


def refuse_non_finite(found: dict[str, float], step: int, run: Path) -> None:
    """Stops a run at a number that is none, and names what is safe."""
    for name, value in found.items():
        if not math.isfinite(value):
            last = last_checkpoint(run)
            good = f"the last good checkpoint is {last}" if last else "none was saved before"
            raise MidusError(
                f"the {name} is {value} at step {step}, so the run stopped before that step "
                f"changed the weights; {good}: lower optimizer.lr or optimizer.memory_lr, or look "
                "at the data of that step"
            )


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that the disk holds no more."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if any(words in str(error) for words in _FULL):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_full_disk(before)


@contextmanager
def disk_errors_named(target: Path, last_good: Path | None) -> Iterator[None]:
    """A full disk becomes one sentence that names what is safe."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, MidusError) as error:
        text = str(error)
        is_torch = "enforce fail" in text  # its writer, which this is around
        if not isinstance(error, OSError) and not is_torch and not is_full_disk(error):
            raise
        with suppress(OSError):
            shutil.rmtree(staged_name(target))
        good = f"the last good checkpoint is {last_good}" if last_good else "none was saved before"
        raise MidusError(
            f"{target} cannot be written ({text.splitlines()[0]}); {good}: free some space and run "
            "again with --resume"
        ) from error


def write_weights(
    model: Any,
    folder: Path,
    *,
    delta: bool,
    keep: bool,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a model folder; every rank takes part.

    Args:
        model: The unwrapped model.
        folder: Where to write.
        delta: Write the inserted tensors only.
        keep: Whether this rank writes.
        tokenizer: Saved beside the model.
        dtype: Type of the written tensors; default: as they train.
    """
    if hasattr(model, "peft_config"):
        names = {name for name in model.state_dict() if _ADAPTER in name}
        tensors = _cast(full_state(model, names, keep), dtype)
        if keep:
            model.save_pretrained(folder, state_dict=tensors)
    elif delta:
        names = {name for name in model.state_dict() if is_inserted(name, model.config)}
        tensors = _cast(full_state(model, names, keep), dtype)
        if keep:
            folder.mkdir(parents=True, exist_ok=True)
            check_space(folder, sum(tensor.nbytes for tensor in tensors.values()))
            config = copy.deepcopy(model.config)
            write_inserted(model, folder, config, tensors)
            if dtype is not None:
                config.dtype = str(dtype).split(".")[1]
            write_surroundings(folder, config, base_licence(config), [])
    else:
        tensors = _cast(full_state(model, None, keep), dtype)
        if keep:
            check_space(folder, sum(tensor.nbytes for tensor in tensors.values()))
            model.save_pretrained(folder, state_dict=tensors)
            if dtype is not None:
                _write_dtype(folder / CONFIG_NAME, dtype)
    if keep and tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _write_dtype(path: Path, dtype: torch.dtype) -> None:
    """The library writes the type the model trained in, not the one its tensors were cast to."""
    values = json.loads(path.read_text())
    values["dtype"] = str(dtype).split(".")[1]
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _cast(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    if dtype is None:
        return tensors
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def read_weights(model: Any, folder: Path) -> None:
    """Puts a checkpoint's weights into a model that has the right shape."""
    delta, adapter = folder / DELTA_NAME, folder / "adapter_model.safetensors"
    if adapter.is_file():
        stored = Weights.open_file(adapter)
        # PEFT leaves the adapter's name out of its files.
        names = {key: key.replace(".weight", ".default.weight") for key in stored}
        fill_state(model, {name: stored.read(key) for key, name in names.items()})
        return
    weights = Weights.open_file(delta) if delta.is_file() else Weights.open_folder(folder)
    own = model.state_dict()
    for name in weights:
        if name not in own:
            raise MidusError(
                f"{folder} holds {name!r}, which the model of this run does not have; resume with "
                "the options the run began with"
            )
        fill_state(model, {name: weights.read(name)})

"""Trials that the clock stopped: what it takes to go on at the same step, with the same bits.

Each has a folder of its own, which takes its place only when it is whole. What a kill left of one
is used where it is whole, and otherwise removed: the trial begins anew.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from midus.studies.loop import Loop
from midus.training.optimizer_state import load_optimizer, save_optimizer

FOLDER = "unfinished"
_FACTS, _WEIGHTS, _OPTIMIZER = "facts.json", "weights.safetensors", "optimizer.safetensors"
_RANDOM = "random.safetensors"


def save_unfinished(out: Path, key: str, loop: Loop, facts: dict[str, Any]) -> None:
    """Writes what changes in training; the facts come last, so with them the rest is whole."""
    saving = _saving(out, key)
    shutil.rmtree(saving, ignore_errors=True)
    _make(saving)
    save_file(_changing(loop.model), saving / _WEIGHTS)
    save_optimizer(loop.optimizer, loop.model, saving / _OPTIMIZER)
    save_file(_random_states(loop.sequences.device), saving / _RANDOM)
    schedule = {k: v for k, v in loop.schedule.state_dict().items() if k != "lr_lambdas"}
    facts = {"done": loop.done, "loss": loop.loss.item(), "schedule": schedule} | facts
    (saving / _FACTS).write_text(json.dumps(facts))
    _put_in_place(out, key)


def load_unfinished(
    out: Path, key: str, loop: Loop, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Puts a trial back to where it was and gives its facts; None if it was not begun."""
    # Newest first: a kill may have come before the last save took its place.
    for folder in (_saving(out, key), _folder(out, key), _old(out, key)):
        if not folder.is_dir():
            continue
        try:
            facts = _load(folder, loop)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            say(f"  {folder} is not whole ({reason}) and is removed")
            shutil.rmtree(folder, ignore_errors=True)
            continue
        if folder == _saving(out, key):
            _put_in_place(out, key)
        return facts
    return None


def drop_unfinished(out: Path, key: str) -> None:
    """Forgets a trial that was stopped, since it has ended; others stay."""
    for folder in (_saving(out, key), _folder(out, key), _old(out, key)):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # others are there
        (out / FOLDER).rmdir()


def _make(folder: Path) -> None:
    """Anew where another process takes its parent away, empty as that is, in between."""
    while True:
        with suppress(FileNotFoundError):
            folder.mkdir(parents=True)
            return


def _folder(out: Path, key: str) -> Path:
    return out / FOLDER / key


def _saving(out: Path, key: str) -> Path:
    return out / FOLDER / f".{key}.saving"


def _old(out: Path, key: str) -> Path:
    return out / FOLDER / f".{key}.old"


def _put_in_place(out: Path, key: str) -> None:
    """Renames before it removes: a folder that is half removed must stand in nobody's way."""
    folder, old = _folder(out, key), _old(out, key)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    _saving(out, key).rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _load(folder: Path, loop: Loop) -> dict[str, Any]:
    """Everything is read before anything is changed, as what cannot be used must leave no trace."""
    facts: dict[str, Any] = json.loads((folder / _FACTS).read_text())
    done, loss, schedule = facts["done"], facts["loss"], facts["schedule"]
    states = load_file(folder / _RANDOM)
    weights = load_file(folder / _WEIGHTS)
    own = _changing(loop.model)
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.items()}:
        raise ValueError("its weights are of another model")
    load_optimizer(loop.optimizer, loop.model, folder / _OPTIMIZER)
    stored = loop.model.state_dict()
    for name, tensor in weights.items():
        stored[name].copy_(tensor)
    lambdas = [None] * len(loop.optimizer.param_groups)
    loop.schedule.load_state_dict({**schedule, "lr_lambdas": lambdas})
    loop.done = done
    loop.loss.fill_(loss)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and loop.sequences.is_cuda:
        torch.cuda.set_rng_state(states["cuda"], loop.sequences.device)
    return facts


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _changing(model: Any) -> dict[str, Tensor]:
    """Trained weights, and buffers that training writes to (statistics of norms)."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stored = model.state_dict()
    buffers = {name: b for name, b in model.named_buffers() if name in stored}
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in {**trained, **buffers}.items()
    }

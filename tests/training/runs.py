"""Tiny training runs: a base, some text or instructions, and options."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB, save_base
from transformers import TrainerCallback

from midus.training.options import TrainOptions
from midus.training.run import TrainResult, train


def make_texts(path, count=120, seed=0):
    """Documents with something to learn: words follow each other in order."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            first = rng.randrange(4, VOCAB - 1)
            words = [f"w{4 + (first + i) % (VOCAB - 4)}" for i in range(rng.randrange(10, 40))]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def make_instructions(path, count=60, seed=0):
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            a, b = rng.randrange(4, VOCAB), rng.randrange(4, VOCAB)
            row = {"prompt": f"w{a} w{b} w5", "completion": f" w{b} w{a}"}
            file.write(json.dumps(row) + "\n")
    return path


def make_options(folder: Path, output="run", stage="cpt", **overrides):
    """Options of a run of 12 steps in ``folder``, whose base and data are made once."""
    base = folder / "base"
    if not base.is_dir():
        save_base(base)
    data = folder / f"{stage}.jsonl"
    if not data.is_file():
        (make_texts if stage == "cpt" else make_instructions)(data)
    values = {
        "stage": stage,
        "model": str(base),
        "output": str(folder / output),
        "upscale": {"memory": {"num_subkeys": 8}},
        "data": {
            "sources": [str(data)],
            "seq_len": 16,
            "held_out": 0.1,
            "cache": str(folder / "cache"),
        },
        "batch_size": 4,
        "max_length": 64,
        "optimizer": {"recipe": "short"},
        "trainer": {
            "max_steps": 12,
            "per_device_train_batch_size": 2,
            "save_steps": 4,
            "logging_steps": 1,
            "report_to": "none",
            **overrides.pop("trainer", {}),
        },
        **overrides,
    }
    options = TrainOptions.from_dict(values)
    return replace(options, optimizer=options.optimizer.resolved(stage))


class Crash(Exception):
    pass


class CrashAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Crash


def assert_resumes_alike(again: TrainOptions, result: TrainResult) -> None:
    """Crashes in a run, resumes it, and compares it with one nobody touched, to the bit."""
    with pytest.raises(Crash):
        train(again, callbacks=[CrashAt(6)])
    resumed = train(again, resume=True)
    assert resumed.losses == result.losses
    stored, expected = (
        load_file(next(run.model.glob("*.safetensors"))) for run in (resumed, result)
    )
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)

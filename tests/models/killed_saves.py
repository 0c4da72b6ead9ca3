"""Kills saves at random moments and checks every folder that is left: run by test_atomic.py.

Children are forked from a process that has imported everything but computed nothing, so that a
save starts at once and a kill lands inside it. Checks run in children too.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tiny import MEMORY, VOCAB, fill_tables, save_base
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from midus import UpscaleConfig, upscale_checkpoint
from midus.models import atomic
from midus.models.checkpoint import DELTA_NAME
from midus.models.weights import Weights

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


def in_child(work) -> int:
    """Runs ``work`` in a forked child and returns its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def finish(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_whole(folder: Path, base: Path) -> bool:
    """Whether a folder loads, has every tensor, and carries one save's tables throughout."""

    def check() -> None:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        values = {
            float(p.detach().flatten()[0])
            for n, p in model.named_parameters()
            if n.endswith("latent_values")
        }
        assert len(values) == 1, values  # each save fills every table with its own number
        reference = Weights.open_folder(base)
        stored = model.model.layers[0].mlp.up_proj.weight
        assert torch.equal(stored, reference.read("model.layers.0.mlp.up_proj.weight"))
        assert model(torch.arange(3, 9).unsqueeze(0)).logits.shape[-1] == VOCAB

    return finish(in_child(check))


def is_loadable(folder: Path) -> bool:
    return finish(in_child(lambda: AutoModelForCausalLM.from_pretrained(folder)))


def mark_of(folder: Path) -> float:
    path = folder / DELTA_NAME
    weights = Weights.open_file(path) if path.exists() else Weights.open_folder(folder)
    name = next(name for name in weights if name.endswith("latent_values"))
    return float(weights.read(name, 0, 1).flatten()[0])


def main() -> None:
    root, way = Path(sys.argv[1]), sys.argv[2]
    if way == "two-renames":
        atomic._exchange = lambda a, b: False
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    base = root / "base"
    out = root / "saves" / "out"
    out.parent.mkdir()
    finish(in_child(lambda: save_base(base, **SIZES)))
    finish(in_child(lambda: upscale_checkpoint(base, root / "start", UpscaleConfig(memory=MEMORY))))

    def save(number: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(root / "start")
        fill_tables(model, scale=0.0)
        for name, parameter in model.named_parameters():
            if name.endswith("latent_values"):
                parameter.data.fill_(number)
        (root / "ready").touch()
        model.save_pretrained(out, max_shard_size="500KB", delta=number % 3 == 0)

    def timed(number: int, delay: float | None) -> tuple[bool, float]:
        """Saves, killed ``delay`` seconds into it; whether it finished, and after how long."""
        (root / "ready").unlink(missing_ok=True)
        child = in_child(lambda: save(number))
        while not (root / "ready").exists():
            time.sleep(0.0005)
        started = time.monotonic()
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        return finish(child), time.monotonic() - started

    finished, longest = timed(1, None)
    assert finished
    rng = random.Random(0)
    counts = {"killed_saves": 0, "killed_overwrites": 0, "old": 0, "new": 0, "none": 0}
    number = 1
    while min(counts["killed_saves"], counts["killed_overwrites"]) < 20:
        number += 1
        assert number < 200, f"too few kills landed inside a save: {counts}"
        is_overwrite = number % 2 == 0
        if not is_overwrite:
            shutil.rmtree(out.parent)
            out.parent.mkdir()
        before = mark_of(out) if is_overwrite else None
        finished, _ = timed(number, rng.uniform(0, longest))
        # How long a save takes varies with what else the machine does. This holds half of the kills
        # inside a save, so that delays reach from its start to past its end on any machine.
        longest = longest / 1.1 if finished else longest * 1.1
        counts["killed_overwrites" if is_overwrite else "killed_saves"] += not finished
        atomic.recover(out)
        if out.exists():
            assert is_whole(out, base), f"{out} does not verify after kill {number}"
            now = mark_of(out)
            assert now in (before, number), (before, now, number)
            counts["new" if now == number else "old"] += 1
        else:
            assert not is_overwrite, "an overwrite lost the old folder"
            counts["none"] += 1
        for entry in out.parent.iterdir():
            if entry != out and is_loadable(entry):
                assert is_whole(entry, base), f"{entry.name} loads but is not whole"
        if not out.exists():
            assert timed(1, None)[0]
    print(*(f"{key}={value}" for key, value in counts.items()))


if __name__ == "__main__":
    main()

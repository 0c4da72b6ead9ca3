"""`kill -9` at any moment, then `--resume`: the weights of a run nobody touched."""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from forked import Forks
from runs import make_options
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

TRAIN = "from midus.cli.main import main; main()"


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks"), "midus.training.run", "trl", "datasets")
    yield forks
    forks.close()


def write_yaml(folder, name, stage):
    options = make_options(
        folder, name, stage, trainer={"max_steps": 60, "save_steps": 3, "save_total_limit": 2}
    ).to_dict()
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def killed(forks, path, run, rng):
    """Runs until a random moment; False if the run was done before.

    One time in three the moment may be before the first step, else it is after it.
    """
    process = forks.start(TRAIN, "train", path, "--resume")
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.is_file() else 0
    early = time.monotonic() + rng.random() * 3 if rng.random() < 1 / 3 else float("inf")
    while process.poll() is None:
        if time.monotonic() > early:
            process.kill()
            process.wait()
            return True
        if metrics.is_file() and metrics.stat().st_mtime_ns > before:
            time.sleep(rng.random() * 1.5)
            process.kill()
            return process.wait() == -signal.SIGKILL
        time.sleep(0.01)
    assert process.returncode == 0, process.stderr
    return False


@pytest.mark.parametrize("stage", ["cpt", "sft"])
def test_killed_runs_end_with_the_weights_of_an_untouched_one(tmp_path, forks, stage):
    seed = random.randrange(10**6)  # drawn afresh: any moment must do
    print(f"seed {seed}")
    whole = write_yaml(tmp_path, "whole", stage)
    forks.run(TRAIN, "train", whole)
    path, rng, kills = write_yaml(tmp_path, "killed", stage), random.Random(seed), 0
    for _ in range(4):
        kills += killed(forks, path, tmp_path / "killed", rng)
    assert kills, "the run was too short to be killed"
    # The last one as a user has it: an interpreter of its own that is torn down in the end.
    subprocess.run([sys.executable, "-m", "midus", "train", path, "--resume"], check=True)
    name = "delta.safetensors" if stage == "cpt" else "model.safetensors"
    a, b = (load_file(tmp_path / run / "model" / name) for run in ("whole", "killed"))
    assert a.keys() == b.keys()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []

"""Two real processes, data-parallel and sharded, compute what one computes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import make_options
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "several_processes.py"
COMMAND = Path(__file__).parent / "command_of_several.py"
TESTS = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(TESTS), str(SCRIPT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}


def run(command):
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def launch(folder, name, sharding="none", processes=2, per_device=2, control="none", resume=False):
    command = [*(TORCHRUN if processes > 1 else [sys.executable]), str(SCRIPT)]
    command += [str(folder), name, sharding, str(per_device), control]
    run(command + ["resume"] * resume)
    return json.loads((folder / name / "facts.json").read_text())


def difference(folder, name, file, one="one"):
    a, b = load_file(folder / one / file), load_file(folder / name / file)
    assert a.keys() == b.keys()
    assert len(a) > 10
    return max((a[key] - b[key]).abs().max().item() for key in a)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    make_options(folder)  # base and text, before several processes want them
    facts = launch(folder, "one", processes=1, per_device=4)
    assert facts["world_size"] == 1
    return folder


def test_two_data_parallel_processes_equal_one(folder):
    facts = launch(folder, "ddp")
    assert (facts["world_size"], facts["type"]) == (2, "DistributedType.MULTI_CPU")
    assert facts["wrapped"] == "DistributedDataParallel"
    assert difference(folder, "ddp", "gradients.safetensors") < 1e-10
    assert difference(folder, "ddp", "model/delta.safetensors") < 1e-8


def test_two_sharded_processes_equal_one_and_resume(folder):
    facts = launch(folder, "fsdp2", sharding="fsdp2")
    assert (facts["world_size"], facts["type"]) == (2, "DistributedType.FSDP")
    assert facts["wrapped"].startswith("FSDP")
    assert facts["sharded"] == facts["parameters"]
    assert difference(folder, "fsdp2", "gradients.safetensors") < 1e-10
    assert difference(folder, "fsdp2", "model/delta.safetensors") < 1e-8
    run = folder / "fsdp2"
    assert len(list((run / "checkpoint-6").glob("optimizer-*-of-00002.safetensors"))) == 2
    for name in ("checkpoint-6", "model"):
        shutil.rmtree(run / name)
    launch(folder, "fsdp2", sharding="fsdp2", resume=True)
    assert difference(folder, "fsdp2", "model/delta.safetensors") < 1e-8


def test_a_sharded_lora_run_equals_one_process(folder):
    launch(folder, "lora", processes=1, per_device=4, control="lora")
    facts = launch(folder, "lora-fsdp2", sharding="fsdp2", control="lora")
    assert facts["sharded"] == facts["parameters"]
    file = "model/adapter_model.safetensors"
    assert difference(folder, "lora-fsdp2", file, one="lora") < 1e-8


def test_the_command_prints_once_and_its_processes_leave_together(tmp_path):
    """Where the interpreter is torn down, gloo's threads abort it one time in many."""
    options = make_options(tmp_path, batch_size=4, trainer={"max_steps": 2})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(options.to_dict()))
    out = run([*TORCHRUN, str(COMMAND), str(tmp_path), "train", str(file)])
    assert out.count("steps      2") == 1
    assert (tmp_path / "run" / "model" / "delta.safetensors").is_file()
    ends = {file.name: file.read_text() for file in tmp_path.glob("*-[01]")}
    assert ends == {"at-exit-0": "False", "at-exit-1": "False"}

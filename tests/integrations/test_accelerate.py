"""Accelerate: weights offloaded to memory and disk, checkpoints dispatched, plain launches."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import (
    cpu_offload,
    disk_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from stored import save_grown
from tiny import TOLERANCE, grown, prompt_ids, relative_error
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from midus import MemoryConfig
from midus.memory import MEMORY_LAYERS
from midus.models import fused

FLOAT32 = TOLERANCE[torch.float32]
IDS = prompt_ids(2)


def assert_same(model, expected):
    """Logits and generated tokens, cached, of two models."""
    with torch.no_grad():
        assert relative_error(model(IDS).logits, expected(IDS).logits) < FLOAT32
    mask, options = torch.ones_like(IDS), {"max_new_tokens": 5, "do_sample": False}
    tokens = [m.generate(IDS, attention_mask=mask, **options) for m in (model, expected)]
    assert torch.equal(*tokens)


@pytest.mark.filterwarnings("ignore:You are calling .generate")
@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_offloaded_models_fetch_their_memory(tmp_path, kind):
    model = grown(memory=MemoryConfig(kind=kind, num_subkeys=8))
    offloaded = cpu_offload(copy.deepcopy(model), execution_device="cpu")
    assert all(p.is_meta for p in offloaded.parameters())
    assert_same(offloaded, model)
    assert_same(disk_offload(copy.deepcopy(model), tmp_path, execution_device="cpu"), model)


def test_no_fused_path_reads_offloaded_weights(monkeypatch):
    model = grown()
    offloaded = cpu_offload(copy.deepcopy(model), execution_device="cpu")
    monkeypatch.setattr(fused, "_DEVICES", ("cuda", "cpu"))
    offloaded.build_value_cache()
    for one in (model, offloaded):
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            one(IDS[:1], past_key_values=cache)
            step = one(IDS[:1, :1], past_key_values=cache).logits
        expected = step if one is model else expected  # noqa: F821
    assert relative_error(step, expected) < FLOAT32


def placed(config, odd):
    """A device map that puts every second block, both kinds among them, elsewhere."""
    blocks = {f"model.layers.{i}": odd if i % 2 else "cpu" for i in range(config.num_hidden_layers)}
    ends = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return {**dict.fromkeys(ends, "cpu"), **blocks}


def test_checkpoints_are_dispatched_whole_or_with_blocks_on_disk(tmp_path):
    model = save_grown(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "full")
    for device_map in ({"": "cpu"}, placed(config, "disk")):
        with init_empty_weights():
            empty = AutoModelForCausalLM.from_config(config)
        dispatched = load_checkpoint_and_dispatch(
            empty.eval(), tmp_path / "full", device_map=device_map, offload_folder=tmp_path / "off"
        )
        assert_same(dispatched, model)


@pytest.mark.parametrize("kind", ["hml", "ultramem"])
@pytest.mark.parametrize("stored", ["full", "delta"])
def test_from_pretrained_leaves_blocks_on_disk(tmp_path, stored, kind):
    model = save_grown(tmp_path, kind=kind)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / stored,
        device_map=placed(model.config, "disk"),
        offload_folder=str(tmp_path / "off"),
    )
    assert all(p.is_meta for p in loaded.model.layers[1].parameters())
    assert_same(loaded, model)


def test_blocks_are_never_split_by_an_automatic_map(tmp_path):
    from accelerate import infer_auto_device_map

    model = save_grown(tmp_path)
    sizes = {"cpu": 120_000, "disk": 10**9}
    placed = infer_auto_device_map(
        model, max_memory=sizes, no_split_module_classes=model._no_split_modules
    )
    assert set(placed.values()) == {"cpu", "disk"}
    assert not any("layers." in name and name.count(".") > 2 for name in placed)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["full", "delta"])
def test_on_a_gpu_blocks_may_stay_in_the_hosts_memory(tmp_path, stored):
    model = save_grown(tmp_path)
    placement = {name: 0 if place == "cpu" else "cpu"
                 for name, place in placed(model.config, "disk").items()}  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / stored, device_map=placement)
    with torch.no_grad():
        out = loaded(IDS.cuda()).logits.cpu()
        assert relative_error(out, model(IDS).logits) < FLOAT32


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_accelerate_launch_trains_in_two_processes_as_in_one(tmp_path):
    """Nothing of ours in the script but ``import midus``."""
    save_grown(tmp_path)
    script = str(Path(__file__).with_name("accelerated.py"))
    launches = {
        # On CPUs `accelerate launch` starts one process whatever it is told.
        1: ("accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no"),
        2: ("torch.distributed.run", "--nproc_per_node", "2", "--standalone"),
    }  # fmt: skip
    results = []
    for processes, launch in launches.items():
        out = tmp_path / f"{processes}.json"
        run(sys.executable, "-m", *launch, script, str(tmp_path / "delta"), str(out))
        results.append(json.loads(out.read_text()))
    assert [result["processes"] for result in results] == [1, 2]
    assert results[1]["losses"] == pytest.approx(results[0]["losses"], rel=1e-4)
    assert results[0]["losses"][-1] < results[0]["losses"][0]

"""Two ranks that share the heads compute what one rank computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stored import save_grown
from tiny import every_family, grown, load

from midus.models import CAUSAL_LM_CLASSES, FAMILIES


@every_family
def test_heads_come_together_as_the_output_projection_would_take_them(family):
    plan = grown(family).tp_plan
    base = FAMILIES[family].config_class.base_model_tp_plan
    assert plan["model.layers.*.head_outputs"] == base["layers.*.self_attn.o_proj"]
    assert {f"model.{name}" for name in base} <= plan.keys()
    # Every rank has all of the memory and of what stands beside it.
    assert not any("memory" in name or "bypass" in name for name in plan)
    assert CAUSAL_LM_CLASSES[family]._tp_plan == FAMILIES[family].causal_lm_class._tp_plan


@pytest.mark.slow
def test_two_ranks_equal_one_in_logits_tokens_and_gradients(tmp_path):
    folders = []
    # Llama's heads stay apart until the memory; OLMo 2's are gathered before their norms.
    for family, stored, kind, bypass in [("llama", "delta", "hml", "attention"),
                                         ("olmo2", "full", "hml", "none"),
                                         ("qwen3", "full", "pkm", "stream")]:  # fmt: skip
        save_grown(tmp_path / family, family, kind, bypass, vocab_size=100)
        folders.append(tmp_path / family / stored)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(Path(__file__).with_name("tensor_parallel.py")), *map(str, folders),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in folders:
        saved, model = load(folder.parent / "saved"), load(folder)
        pairs = zip(saved.state_dict().values(), model.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)

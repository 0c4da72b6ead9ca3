"""One rank of a tensor-parallel model against the whole: FOLDER OUT."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import midus  # registers the up-scaled classes
from midus.training.distributed import leave_together

IDS = torch.arange(24).view(2, 12) * 5 % 90 + 5


def generate(model):
    return model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, min_new_tokens=8,
        do_sample=False,
    )  # fmt: skip


def main(folder, out):
    """Asserts what the test claims; a rank that fails ends the run."""
    parallel = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2)
    )
    whole = AutoModelForCausalLM.from_pretrained(folder)
    block = parallel.model.layers[1]
    assert (
        block.self_attn.q_proj.weight.to_local().shape[0] * 2
        == block.self_attn.q_proj.weight.shape[0]
    )
    assert all(type(p) is torch.nn.Parameter for p in block.memory.parameters())
    with torch.no_grad():
        logits, expected = parallel(IDS).logits, whole(IDS).logits
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert torch.equal(generate(parallel), generate(whole))
    for model in (parallel, whole):
        model.train()
        model.freeze_base()
        model(IDS, labels=IDS).loss.backward()
    pairs = zip(parallel.named_parameters(), whole.parameters(), strict=True)
    for (name, one), other in pairs:
        if other.grad is not None:
            grad = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            assert (grad - other.grad).abs().max() < 1e-4 * other.grad.abs().max(), name
    with pytest.raises(midus.MidusError, match="shared out over processes"):
        parallel.save_pretrained(f"{out}-delta", delta=True)
    parallel.save_pretrained(out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for folder in sys.argv[1:]:
        main(folder, os.path.join(os.path.dirname(folder), "saved"))
    leave_together()

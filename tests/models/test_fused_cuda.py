"""Fused blocks and decoding by graphs on a GPU: the kernels inside whole models."""

import copy

import pytest
import torch
from tiny import fill_tables, prompt_ids, tiny_base

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.models import fused
from midus.models.fast import first_difference, generate_fast
from midus.models.fused_base import fuse_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "eos_token_id": None,
}
# Largest difference of gradients' norms; in float32 sums in another order.
GRADIENTS = {"float32": 1e-4, "autocast": 5e-2}


def model(kind, dtype=torch.float32):
    base = tiny_base(**SHAPE).cuda()
    if kind == "base":
        return base.to(dtype)
    memory = MemoryConfig(num_subkeys=16, top_k=4)
    return fill_tables(upscale(base, UpscaleConfig(memory=memory)), scale=0.3).cuda().to(dtype)


@pytest.mark.parametrize("kind", ["base", "hml"])
@pytest.mark.parametrize("length", [12, 700])
def test_float32_gives_the_same_greedy_tokens(kind, length):
    # The longer one has more slots than the short caches' kernels are cut for.
    assert first_difference(model(kind), prompt_ids(1, length).cuda(), 200) is None


@pytest.mark.parametrize("kind", ["base", "hml"])
def test_a_padded_batch_gives_the_same_greedy_tokens(kind):
    ids = prompt_ids(3, 40).cuda()
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    grown = model(kind)
    options = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False}
    assert torch.equal(generate_fast(grown, ids, **options), grown.generate(ids, **options))


@pytest.mark.parametrize("kind", ["base", "hml"])
def test_bfloat16_parts_only_where_two_words_are_about_as_likely(kind):
    difference = first_difference(model(kind, torch.bfloat16), prompt_ids(1, 30).cuda(), 100)
    assert difference is None or abs(difference.margin) < 0.5


@pytest.mark.parametrize("kind", ["base", "hml"])
@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_training_has_the_plain_gradients(kind, precision, monkeypatch):
    fast, ids = model(kind).train(), prompt_ids(4, 64).cuda()
    plain = copy.deepcopy(fast)
    fast.requires_grad_(True)
    plain.requires_grad_(True)
    assert fuse_blocks(fast) == 4

    def run(trained):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            trained(ids, labels=ids).loss.backward()

    run(fast)
    monkeypatch.setattr(fused, "_DEVICES", ())
    run(plain)
    for (name, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        if precision == "autocast" and ".memory." in name:
            continue  # rounding may choose other slots
        assert (a.grad - b.grad).norm() <= GRADIENTS[precision] * b.grad.norm(), name

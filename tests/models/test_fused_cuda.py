"""Fused blocks and decoding by graphs on a GPU: the kernels inside whole models."""

import pytest
import torch
from tiny import TOLERANCE, fill_tables, prompt_ids, tiny_base

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.models import fused
from midus.models.fast import first_difference, generate_fast
from midus.models.fused_base import fuse_blocks

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "eos_token_id": None,
}


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


@pytest.mark.parametrize("length", [12, 1000])
def test_eager_decoding_over_a_growing_cache_gives_the_plain_tokens(length, monkeypatch):
    # The longer one passes from the parts of short caches to those of long ones.
    grown, ids = model("hml"), prompt_ids(1, length).cuda()
    options = {"max_new_tokens": 60, "do_sample": False}
    found = grown.generate(ids, **options)
    monkeypatch.setattr(fused, "_DEVICES", ())
    assert torch.equal(grown.generate(ids, **options), found)


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


def gradients(trained, ids, autocast=False):
    trained.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        trained(ids, labels=ids).loss.backward()
    # Under autocast memories are left out: rounding may choose other slots.
    return {
        name: parameter.grad.clone()
        for name, parameter in trained.named_parameters()
        if not (autocast and ".memory." in name)
    }


def distances(found, exact):
    return {
        name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in found
    }


@pytest.mark.parametrize("kind", ["base", "hml"])
def test_training_has_the_plain_gradients(kind, monkeypatch):
    trained, ids = model(kind).train().requires_grad_(True), prompt_ids(4, 64).cuda()
    assert fuse_blocks(trained) == 4
    fast, fast_cast = gradients(trained, ids), gradients(trained, ids, autocast=True)
    monkeypatch.setattr(fused, "_DEVICES", ())
    exact, plain_cast = gradients(trained, ids), gradients(trained, ids, autocast=True)
    assert max(distances(fast, exact).values()) < TOLERANCE[torch.float32]
    # Under autocast all of them are off, ours no more than the others.
    ours, plain = distances(fast_cast, exact), distances(plain_cast, exact)
    assert sum(ours.values()) < 1.2 * sum(plain.values())

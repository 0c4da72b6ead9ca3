"""Fused blocks of the base against transformers' own, with the ops' references on a CPU."""

import copy
import pickle

import pytest
import torch
from tiny import TOLERANCE, grown, prompt_ids, relative_error, tiny_base
from transformers import StaticCache

from midus.models import fused_base
from midus.models.fused_base import fuse_blocks, fused_blocks, unfuse_blocks

FAMILIES = ["llama", "mistral", "qwen2"]


def tiny(family):
    model = tiny_base(family, **({"sliding_window": None} if family == "mistral" else {}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Qwen2's start at zero
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def calls(count_steps):
    return count_steps(fused_base, "gated", "gate_token")


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_plain_ones(family, calls):
    plain = tiny(family)
    model = copy.deepcopy(plain)
    assert fuse_blocks(model) == 4
    ids = prompt_ids(2)
    for m in (plain, model):
        m(ids, labels=ids).loss.backward()
    assert calls["gated"] == 4
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) < TOLERANCE[torch.float32], name


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_over_a_static_cache_gives_the_plain_logits(family, calls):
    plain = tiny(family)
    model = copy.deepcopy(plain)
    fuse_blocks(model)
    ids = prompt_ids(1)
    logits = []
    for m in (plain, model):
        cache = StaticCache(config=m.config, max_cache_len=32)
        with torch.no_grad():
            out = [m(ids, past_key_values=cache).logits[:, -1]]
            for token in (5, 6, 7):
                out.append(m(torch.tensor([[token]]), past_key_values=cache).logits[:, -1])
        logits.append(torch.stack(out))
        assert all(int(layer.cumulative_length) == 15 for layer in cache.layers)
    assert relative_error(logits[1], logits[0]) < TOLERANCE[torch.float32]
    assert calls["gate_token"] == 3 * 4


def test_memory_blocks_are_left_to_themselves(calls):
    model = grown()
    assert fuse_blocks(model) == 4
    patched = ["forward" in block.__dict__ for block in model.model.layers]
    assert [i for i, p in enumerate(patched) if not p] == list(model.config.memory_positions)


def test_it_can_be_undone(calls):
    model = tiny("llama")
    with fused_blocks(model):
        model(prompt_ids(1))
        assert calls["gated"] == 4
    assert not any("forward" in block.__dict__ for block in model.model.layers)
    fuse_blocks(model)
    with fused_blocks(model):
        pass
    assert all("forward" in block.__dict__ for block in model.model.layers)
    unfuse_blocks(model)
    model(prompt_ids(1))
    assert calls["gated"] == 4


def test_forwards_of_others_stay_theirs():
    model = tiny("llama")
    block = model.model.layers[1]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    kept = block.forward
    assert fuse_blocks(model) == 3
    unfuse_blocks(model)
    assert block.forward is kept


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2"])
def test_other_families_are_left_alone(family):
    assert fuse_blocks(tiny_base(family)) == 0


@pytest.mark.parametrize("watched", ["mlp", "mlp.act_fn", "post_attention_layernorm", "self_attn"])
def test_what_is_watched_is_called(watched, calls):
    model, seen = tiny("llama"), []
    fuse_blocks(model)
    model.model.layers[2].get_submodule(watched).register_forward_hook(lambda *_: seen.append(1))
    model(prompt_ids(1))
    assert seen == [1]
    assert calls["gated"] == 3


def test_another_activation_is_computed_as_it_is(calls):
    model = tiny("llama")
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    expected = model(prompt_ids(1)).logits
    fuse_blocks(model)
    assert relative_error(model(prompt_ids(1)).logits, expected) < TOLERANCE[torch.float32]
    assert calls["gated"] == 3


def test_one_foreign_forward_does_not_keep_the_rest_from_it(calls):
    model = tiny("llama")
    block = model.model.layers[1]
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with fused_blocks(model):
        model(prompt_ids(1))
    assert calls["gated"] == 3


def test_copies_and_pickles_stay_whole(calls):
    model = tiny("llama")
    fuse_blocks(model)
    expected = model(prompt_ids(1)).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.model.layers[0].mlp.down_proj.weight.data.zero_()
        assert not torch.equal(other(prompt_ids(1)).logits, expected)  # it has blocks of its own
    assert torch.equal(model(prompt_ids(1)).logits, expected)


def test_checkpointing_computes_the_same(calls):
    plain = tiny("llama")
    model = copy.deepcopy(plain)
    fuse_blocks(model)
    model.gradient_checkpointing_enable()
    model.train()
    ids = prompt_ids(2)
    for m in (plain, model):
        m(ids, labels=ids).loss.backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) < TOLERANCE[torch.float32]
    assert calls["gated"] == 8  # and once more in the backward pass

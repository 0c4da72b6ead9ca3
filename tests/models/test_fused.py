"""The fused steps of a memory block against its plain path, with the ops' references on a CPU."""

import pytest
import torch
from tiny import TOLERANCE, grown, prompt_ids, relative_error
from transformers import DynamicCache, StaticCache

from midus import MemoryConfig
from midus.models import fused

FAMILIES = ["llama", "mistral", "qwen2"]


def tiny(family="llama", memory=None):
    overrides = {"sliding_window": None} if family == "mistral" else {}
    memory = memory or MemoryConfig(num_subkeys=8, top_k=4)
    model = grown(family, memory=memory, **overrides)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Qwen2's start at zero
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def calls(monkeypatch):
    """Lets the fused steps run on a CPU and counts those that did."""
    counted = {"attend": 0, "decode": 0}
    monkeypatch.setattr(fused, "_DEVICES", ("cuda", "cpu"))
    real_attend, real_project = fused.rotate_heads, fused.attend_and_read

    def rotate_heads(*args):
        counted["attend"] += 1
        return real_attend(*args)

    def attend_and_read(*args):
        counted["decode"] += 1
        return real_project(*args)

    monkeypatch.setattr(fused, "rotate_heads", rotate_heads)
    monkeypatch.setattr(fused, "attend_and_read", attend_and_read)
    return counted


def plain(monkeypatch, run):
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_DEVICES", ())
        return run()


@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_tokens_gives_the_plain_output_and_gradients(family, calls, monkeypatch):
    model = tiny(family)
    ids = prompt_ids(2)

    def run():
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), grads

    loss, grads = run()
    assert calls["attend"] == len(model.config.memory_positions)
    expected_loss, expected = plain(monkeypatch, run)
    assert relative_error(loss, expected_loss) < TOLERANCE[torch.float32]
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert relative_error(grad, expected[name]) < TOLERANCE[torch.float32], name


def decode(model, ids, mask, cache, steps=4):
    """Logits of every step after a prefill, greedy."""
    logits = []
    with torch.no_grad():
        out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        for _ in range(steps):
            logits.append(out.logits[:, -1])
            token = out.logits[:, -1:].argmax(-1)
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            out = model(token, attention_mask=mask, past_key_values=cache, use_cache=True)
    return torch.stack([*logits, out.logits[:, -1]])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_decoding_one_token_gives_the_plain_logits(family, batch, cache_class, calls, monkeypatch):
    model = tiny(family).eval()
    ids, mask = prompt_ids(batch), None
    if batch == 2:  # padding on the left
        mask = torch.ones_like(ids)
        mask[1, :5] = 0

    def run():
        options = {"max_cache_len": 32} if cache_class is StaticCache else {}
        return decode(model, ids, mask, cache_class(config=model.config, **options))

    expected = plain(monkeypatch, run)
    model.build_value_cache()
    assert relative_error(run(), expected) < TOLERANCE[torch.float32]
    assert calls["decode"] == 4 * len(model.config.memory_positions)


@pytest.mark.parametrize(
    "options",
    [
        {"query_norm": "layer"},
        {"memory_output_proj": True},
        {"attention_residual": True},
        {"attn_output_proj": True},
        {"values": "shared"},
        {"kind": "pkm"},
    ],
)
def test_other_layers_decode_by_the_plain_path_after_fused_attention(options, calls, monkeypatch):
    model = tiny(memory=MemoryConfig(num_subkeys=8, top_k=4, **options)).eval()
    for name, parameter in model.named_parameters():
        if "memory" in name:
            torch.nn.init.normal_(parameter)
    ids = prompt_ids(1)

    def run():
        return decode(model, ids, None, DynamicCache(config=model.config))

    expected = plain(monkeypatch, run)
    model.build_value_cache()
    assert relative_error(run(), expected) < TOLERANCE[torch.float32]
    assert calls["decode"] == 0
    assert calls["attend"] > 0


@pytest.mark.parametrize("watched", ["self_attn", "input_layernorm", "memory", "self_attn.q_proj"])
def test_what_is_watched_is_called(watched, calls):
    model = tiny().eval()
    model.build_value_cache()
    block = model.model.layers[model.config.memory_positions[0]]
    seen = []
    hook = block.get_submodule(watched).register_forward_hook(lambda *_: seen.append(1))
    decode(model, prompt_ids(1), None, DynamicCache(config=model.config))
    assert len(seen) == 5  # prefill and four tokens
    hook.remove()


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2"])
def test_families_with_another_attention_are_left_alone(family, calls):
    model = grown(family)
    model(prompt_ids(1))
    assert calls == {"attend": 0, "decode": 0}


def test_a_sliding_window_is_left_alone(calls):
    model = grown("mistral", sliding_window=4)
    model(prompt_ids(1))
    assert calls == {"attend": 0, "decode": 0}

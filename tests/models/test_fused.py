"""The fused steps of a memory block against its plain path, with the ops' references on a CPU."""

import pytest
import torch
from tiny import (
    MEMORY,
    TOLERANCE,
    every_bypass,
    fill_tables,
    grown,
    prompt_ids,
    relative_error,
    tiny_base,
)
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.models import block as block_module
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


@every_bypass
@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_tokens_gives_the_plain_output_and_gradients(
    family, bypass, calls, monkeypatch
):
    model = tiny(family, MemoryConfig(num_subkeys=8, top_k=4, bypass=bypass))
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


def test_a_bypass_of_the_stream_reads_the_norm_that_attention_reads(calls, monkeypatch):
    model = tiny(memory=MemoryConfig(num_subkeys=8, top_k=4, bypass="stream"))
    made, read = [], []
    real = fused.fused_norm

    def fused_norm(*args):
        made.append(real(*args))
        return made[-1]

    for module in (fused, block_module):
        monkeypatch.setattr(module, "fused_norm", fused_norm)
    for position in model.config.memory_positions:
        block = model.model.layers[position]
        for reader in (block.self_attn.v_proj, block.bypass):
            reader.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model(prompt_ids(1))
    assert len(made) == calls["attend"] == 2
    # Stream, queries, keys, values, bypass: the last four are the norm, at one place.
    wanted = [tensor.data_ptr() for norm in made for tensor in norm[3:]]
    assert [tensor.data_ptr() for tensor in read] == wanted
    assert len(set(wanted)) == 2


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
        {"bypass": "attention"},
        {"bypass": "stream"},
        {"bypass": "both"},
        {"attention_residual": True},
        {"attn_output_proj": True},
        {"values": "shared"},
        {"kind": "pkm"},
    ],
)
def test_other_layers_decode_by_the_plain_path_after_fused_attention(options, calls, monkeypatch):
    model = tiny(memory=MemoryConfig(num_subkeys=8, top_k=4, **options)).eval()
    for name, parameter in model.named_parameters():
        if "memory" in name or "bypass" in name:
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


def single_token(model, cache, mask):
    with torch.no_grad():
        return model(torch.tensor([[5]]), attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("shape", ["heads", "flat", "float"])
def test_masks_of_other_forms_are_left_to_the_plain_path(shape, calls, monkeypatch):
    model = tiny().eval()
    model.build_value_cache()
    seen = torch.ones(1, 1, 1, 13, dtype=torch.bool)
    seen[..., :4] = False
    mask = {
        "heads": seen.repeat(1, 4, 1, 1).index_fill(1, torch.tensor([1]), True),
        "flat": seen[:, 0, 0].long(),
        "float": torch.zeros(1, 1, 1, 13).masked_fill(~seen, torch.finfo(torch.float32).min),
    }[shape]

    def run():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt_ids(1), past_key_values=cache)
        return single_token(model, cache, mask)

    found = run()
    assert relative_error(found, plain(monkeypatch, run)) < TOLERANCE[torch.float32]
    assert (calls["decode"] > 0) == (shape == "flat")  # transformers makes the flat one plain


def test_caches_that_do_more_than_hold_are_updated_by_themselves(calls):
    updated = []

    class Counting(DynamicCache):
        def update(self, *args, **kwargs):
            updated.append(args[2])
            return super().update(*args, **kwargs)

    model = tiny().eval()
    model.build_value_cache()
    cache = Counting(config=model.config)
    decode(model, prompt_ids(1), None, cache, steps=1)
    assert updated == [*range(6)] * 2
    assert calls["decode"] == 0
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    block = model.model.layers[model.config.memory_positions[0]]
    assert fused.cache_layer(block, {"past_key_values": offloaded}) is None


def test_a_cache_grows_as_by_its_own_update(calls, monkeypatch):
    # The fused step sets what `DynamicLayer.update` sets; were there more to it, this would tell.
    model = tiny().eval()
    model.build_value_cache()

    def run():
        cache = DynamicCache(config=model.config)
        decode(model, prompt_ids(1), None, cache)
        return cache

    found, expected = run(), plain(monkeypatch, run)
    assert calls["decode"] == 4 * len(model.config.memory_positions)
    assert found.get_seq_length() == expected.get_seq_length() == 12 + 4
    for own, other in zip(*(map(vars, cache.layers) for cache in (found, expected)), strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            if not isinstance(value, torch.Tensor):
                assert value == other[name], name
                continue
            assert value.shape == other[name].shape
            assert value.stride() == other[name].stride()
            assert relative_error(value, other[name]) < TOLERANCE[torch.float32]


def test_tensors_of_a_cache_that_somebody_kept_are_not_written_to(calls):
    model = tiny().eval()
    model.build_value_cache()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt_ids(1), past_key_values=cache)
        kept = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
        copies = [tensor.clone() for tensor in kept]
        for token in (5, 7):
            model(torch.tensor([[token]]), past_key_values=cache)
    assert calls["decode"] == 2 * 2
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_a_cache_that_lies_otherwise_is_updated_by_itself(calls, monkeypatch):
    model = tiny().eval()
    model.build_value_cache()
    updated, real = [], DynamicLayer.update

    def update(self, *args, **kwargs):
        updated.append(self)
        return real(self, *args, **kwargs)

    def run():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt_ids(1), past_key_values=cache)
            first, second = (cache.layers[i] for i in model.config.memory_positions)
            first.keys = first.keys.transpose(1, 2).contiguous().transpose(1, 2)
            updated.clear()
            logits = model(torch.tensor([[5]]), past_key_values=cache).logits
        return logits, first in updated, second in updated

    monkeypatch.setattr(DynamicLayer, "update", update)
    found, *updates = run()
    assert updates == [True, False]
    assert calls["decode"] == 2
    expected, *_ = plain(monkeypatch, run)
    assert relative_error(found, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cache_made_ready_before_its_first_token_can_be_decoded_into(
    cache_class, calls, monkeypatch
):
    model = tiny().eval()
    model.build_value_cache()
    config = model.config
    options = {"max_cache_len": 4} if cache_class is StaticCache else {}

    def run():
        cache = cache_class(config=config, **options)
        cache.early_initialization(
            1, config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cpu")
        )
        with torch.no_grad():
            return [
                model(torch.tensor([[token]]), past_key_values=cache).logits for token in (5, 7)
            ]

    for found, expected in zip(run(), plain(monkeypatch, run), strict=True):
        assert relative_error(found, expected) < TOLERANCE[torch.float32]
    assert calls["decode"] > 0


def test_a_cache_that_could_not_grow_is_as_it_was(calls, monkeypatch):
    # Memory may be short where the slots are filled; their tensors must not be taken for full.
    model = tiny().eval()
    model.build_value_cache()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt_ids(1), past_key_values=cache)
        layer = cache.layers[model.config.memory_positions[0]]
        before = layer.keys, layer.values

        def fail(*args):
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr(fused, "attend_and_read", fail)
            with pytest.raises(torch.OutOfMemoryError):
                model(torch.tensor([[5]]), past_key_values=cache)
    assert layer.keys is before[0]
    assert layer.values is before[1]


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_cache_of_another_type_is_not_read_by_the_kernel(name):
    block, tokens = tiny().model.layers[1], torch.zeros(1, 1, 32)
    layer = DynamicLayer()
    layer.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    assert fused.can_stream(block, tokens, layer)
    setattr(layer, name, getattr(layer, name).double())
    assert not fused.can_stream(block, tokens, layer)


def test_embeddings_that_are_a_slice_are_read_rightly(calls, monkeypatch):
    model = upscale(tiny_base(), UpscaleConfig(memory=MEMORY, placement="bottom_heavy"))
    model = fill_tables(model).eval()
    model.build_value_cache()
    assert model.config.memory_positions[0] == 0
    embeds = torch.randn(2, 3, 32)

    def run():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(inputs_embeds=embeds[:, :2], past_key_values=cache)
            return model(inputs_embeds=embeds[:, -1:], past_key_values=cache).logits

    assert relative_error(run(), plain(monkeypatch, run)) < TOLERANCE[torch.float32]


def test_gradients_can_be_listened_to(calls):
    model, seen = tiny().train(), []
    block = model.model.layers[model.config.memory_positions[0]]
    block.self_attn.register_full_backward_hook(lambda *_: seen.append(1))
    ids = prompt_ids(1)
    model(ids, labels=ids).loss.backward()
    assert seen == [1]


def test_asking_for_hidden_states_once_does_not_slow_what_follows(calls):
    model = tiny()
    ids = prompt_ids(1)
    attentions = model(ids, output_hidden_states=True).hidden_states
    assert len(attentions) == len(model.model.layers) + 1
    before = calls["attend"]
    model(ids)
    assert calls["attend"] == before + len(model.config.memory_positions)


@pytest.mark.parametrize("part", ["input_layernorm", "self_attn"])
def test_parts_that_adapters_replaced_are_called(part, calls):
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            seen.append(1)
            return self.inner(*args, **kwargs)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    model, seen = tiny(), []
    block = model.model.layers[model.config.memory_positions[0]]
    setattr(block, part, Wrapped(getattr(block, part)))
    model(prompt_ids(1))
    assert seen == [1]

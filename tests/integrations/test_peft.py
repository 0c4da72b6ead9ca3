"""PEFT on up-scaled models: adapters of attention and memory, trained, saved, loaded, merged."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import (
    TOLERANCE,
    each_bypass,
    every_family,
    fill_tables,
    grown,
    load,
    prompt_ids,
    relative_error,
    save_base,
    tiny_base,
)
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import midus
from midus import MemoryConfig, MidusError, UpscaleConfig, upscale
from midus.memory import MEMORY_LAYERS
from midus.models import fused, fused_base
from midus.models.fused_base import fuse_blocks

FLOAT32 = TOLERANCE[torch.float32]
IDS = prompt_ids(2)


def save_grown(folder, family="llama", delta=False, memory=None):
    """A stored grown model with filled tables."""
    save_base(folder / "base", family)
    memory = memory or MemoryConfig(num_subkeys=8, top_k=4)
    model = fill_tables(upscale(load(folder / "base"), UpscaleConfig(memory=memory)))
    model.save_pretrained(folder / "grown", delta=delta)
    return folder / "grown"


def adapted(model, inserted_only=False, **options):
    """The model with LoRA on every projection, whose both factors are random."""
    targets = midus.lora_targets(model, inserted_only)
    model = get_peft_model(model, LoraConfig(r=2, **targets, **options)).eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


@every_family
@pytest.mark.parametrize("delta", [False, True])
def test_trained_saved_loaded_and_merged_adapters_are_one_model(tmp_path, family, delta):
    folder = save_grown(tmp_path, family, delta)
    model = load(folder)
    before = logits(model)
    model = get_peft_model(model, LoraConfig(r=2, **midus.lora_targets(model)))
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in adapters)
    assert sum("memory.values" in name for name in adapters) == 4  # A and B of two blocks
    optimizer = torch.optim.SGD(adapters.values(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert all(parameter.grad.any() for parameter in adapters.values())
    trained = logits(model.eval())
    assert relative_error(trained, before) > 1e-2
    with model.disable_adapter():
        assert relative_error(logits(model), before) < FLOAT32
    model.save_pretrained(tmp_path / "adapter")

    assert relative_error(logits(PeftModel.from_pretrained(load(folder), tmp_path / "adapter")), trained) < FLOAT32  # fmt: skip  # noqa: E501
    # The adapter's folder alone names the model it belongs to.
    by_name = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert relative_error(logits(by_name), trained) < FLOAT32

    merged = model.merge_and_unload()
    assert type(merged) is type(load(folder))
    assert relative_error(logits(merged), trained) < FLOAT32
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(merged))


@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_projections_of_every_memory_layer_are_adapted(kind):
    projections = {
        "hml": ["memory.values.value_proj"],
        "linear": ["memory.query_proj.weight"],
        "pkm": ["memory.query_proj.weight"],
        "ultramem": ["memory.query_proj.weight", "memory.values.value_proj"],
    }
    model = grown(memory=MemoryConfig(kind=kind, num_subkeys=8))
    targets = midus.lora_targets(model)
    assert targets["target_parameters"] == projections[kind]
    assert {"q_proj", "down_proj"} <= set(targets["target_modules"])
    before = logits(model)
    config = LoraConfig(r=2, target_modules=[], target_parameters=targets["target_parameters"])
    model = get_peft_model(model, config)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad.any() for n, p in model.named_parameters() if "lora_B" in n)
    assert relative_error(logits(model), before) < FLOAT32


@each_bypass
def test_projections_after_and_beside_the_memory_are_adapted_and_merged(bypass):
    has_proj = bypass != "joined"
    memory = MemoryConfig(num_subkeys=8, memory_output_proj=has_proj, bypass=bypass)
    plain = grown(memory=memory)
    model = adapted(copy.deepcopy(plain), inserted_only=True)
    targets = midus.lora_targets(plain, inserted_only=True)["target_parameters"]
    names = ["bypass.weight", "memory.values.value_proj"]
    names += ["memory_output_proj.weight"] if has_proj else []
    assert targets == names
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad.any() for n, p in model.named_parameters() if "lora_B" in n)
    trained = logits(model)
    assert relative_error(trained, logits(plain)) > 1e-2
    merged = model.merge_and_unload()
    assert relative_error(logits(merged), trained) < FLOAT32
    for name in names:
        own, before = (m.model.layers[1].get_parameter(name) for m in (merged, plain))
        assert relative_error(own, before) > 1e-3


def test_the_merged_projection_is_w_h_plus_its_heads_low_rank_product():
    model = adapted(grown(), lora_alpha=6)
    wrapped = model.base_model.model.model.layers[1].memory.values
    weight = wrapped.get_param().detach().clone()  # [H, R, O]
    a, b = (wrapped.get_submodule(name).default.weight.detach() for name in ("lora_A", "lora_B"))
    merged = model.merge_and_unload().model.layers[1].memory.values.value_proj
    for head in range(4):
        # PEFT keeps the heads' factors of A in one piece after the other, those of B in turns.
        product = b[:, head::4] @ a[2 * head : 2 * head + 2] * 6 / 2
        torch.testing.assert_close(merged[head], weight[head] + product)


def test_adapters_of_inserted_blocks_alone_end_in_a_delta(tmp_path):
    folder = save_grown(tmp_path)
    targets = midus.lora_targets(load(folder), inserted_only=True)
    assert {name.split(".")[2] for name in targets["target_modules"]} == {"1", "4"}
    merged = adapted(load(folder), inserted_only=True).merge_and_unload()
    merged.save_pretrained(tmp_path / "delta", delta=True)
    assert torch.equal(logits(load(tmp_path / "delta")), logits(merged))
    merged = adapted(load(folder)).merge_and_unload()
    with pytest.raises(MidusError, match="so a delta would lose it"):
        merged.save_pretrained(tmp_path / "delta", delta=True)


def test_copied_block_models_have_modules_alone():
    model = upscale(tiny_base(), UpscaleConfig(method="llama_pro", num_inserted=2))
    assert midus.lora_targets(model) == {
        "target_modules": [
            "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
        ]
    }  # fmt: skip
    assert len(midus.lora_targets(model, inserted_only=True)["target_modules"]) == 2 * 7


def test_memory_layers_can_train_whole_beside_adapters(tmp_path):
    folder = save_grown(tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["memory"])
    model = get_peft_model(load(folder), config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    trained = logits(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    assert relative_error(logits(again), trained) < FLOAT32
    merged = again.merge_and_unload()
    assert relative_error(logits(merged), trained) < FLOAT32
    assert (merged.model.layers[1].memory.values.latent_values
            != load(folder).model.layers[1].memory.values.latent_values).any()  # fmt: skip


def test_transformers_own_adapter_methods_work_and_save(tmp_path):
    folder = save_grown(tmp_path)
    model = load(folder)
    plain = logits(model)
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, **midus.lora_targets(model)))
    with_adapter = logits(model.eval())
    assert relative_error(with_adapter, plain) > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    again = load(folder)
    again.load_adapter(str(tmp_path / "adapter"))
    assert relative_error(logits(again), with_adapter) < FLOAT32
    again.disable_adapters()
    assert relative_error(logits(again), plain) < FLOAT32


def test_adapters_generate_the_same_with_and_without_a_cache():
    model = adapted(grown())
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    mask = torch.ones_like(IDS)
    cached = model.generate(input_ids=IDS, attention_mask=mask, **options)
    plain = model.generate(input_ids=IDS, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(cached, plain)


# What fused paths read by themselves they must not read past an adapter.


def decoded(model, cache_class):
    """Logits of a prompt and of three tokens after it, with value caches where there are any."""
    config = model.config
    cache = cache_class(config=config, **({} if cache_class is DynamicCache else {"max_cache_len": 32}))  # fmt: skip  # noqa: E501
    ids = prompt_ids(1)
    with torch.no_grad():
        out = [model(ids, past_key_values=cache).logits[:, -1]]
        for token in (5, 6, 7):
            out.append(model(torch.tensor([[token]]), past_key_values=cache).logits[:, -1])
    return torch.stack(out)


TARGETS = {
    "attention": {"target_modules": ["q_proj"]},
    "keys": {"target_modules": [], "target_parameters": ["keys.row_keys"]},
    "values": {"target_modules": [], "target_parameters": ["values.value_proj"]},
    "tables": {"target_modules": [], "target_parameters": ["values.latent_values"]},
    "attention bypass": {"target_modules": [], "target_parameters": ["bypass.weight"]},
    "stream bypass": {"target_modules": [], "target_parameters": ["bypass.weight"]},
    "feed_forward": {"target_modules": ["gate_proj", "down_proj", "o_proj"]},
}


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@pytest.mark.parametrize("targets", TARGETS)
def test_no_fused_path_reads_past_an_adapter(targets, cache_class, monkeypatch):
    config = LoraConfig(r=2, init_lora_weights=False, **TARGETS[targets])
    bypass = targets.split()[0] if targets.endswith(" bypass") else "none"
    memory = MemoryConfig(num_subkeys=8, top_k=4, bypass=bypass)
    model = get_peft_model(grown(memory=memory), config).eval()
    expected = decoded(model, cache_class)
    with model.disable_adapter():
        assert relative_error(decoded(model, cache_class), expected) > 1e-2
    monkeypatch.setattr(fused, "_DEVICES", ("cuda", "cpu"))
    inner = model.get_base_model()
    inner.build_value_cache()
    assert fuse_blocks(inner) == 4
    assert relative_error(decoded(model, cache_class), expected) < FLOAT32


def test_parametrized_and_subclassed_weights_are_left_to_their_modules(monkeypatch):
    class Packed(torch.Tensor):
        """Like a quantizer's: a float to look at, something else in memory."""

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = grown()
    other = copy.deepcopy(model)
    block = model.model.layers[1]
    torch.nn.utils.parametrize.register_parametrization(block.self_attn.q_proj, "weight", Doubled())
    torch.nn.utils.parametrize.register_parametrization(block.memory.values, "value_proj", Doubled())  # fmt: skip  # noqa: E501
    for name in ("self_attn.q_proj.weight", "memory.values.value_proj"):
        other.model.layers[1].get_parameter(name).data.mul_(2)
    expected = decoded(other, StaticCache)
    monkeypatch.setattr(fused, "_DEVICES", ("cuda", "cpu"))
    model.build_value_cache()
    fuse_blocks(model)
    assert relative_error(decoded(model, StaticCache), expected) < FLOAT32
    linear = torch.nn.Linear(4, 4, bias=False)
    tokens = torch.randn(1, 1, 4)
    assert fused.is_plain_linear(linear, tokens)
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Packed))
    assert not fused.is_plain_linear(linear, tokens)
    assert not fused_base._is_plain(linear, tokens)

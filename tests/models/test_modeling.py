"""An up-scaled model is a real Hugging Face model: generation, caches, compile, training."""

import copy

import pytest
import torch
from tiny import (
    MEMORY,
    TOLERANCE,
    each_bypass,
    every_bypass,
    every_family,
    fill_tables,
    grown,
    load,
    prompt_ids,
    relative_error,
    tiny_base,
)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, StaticCache

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.memory import MEMORY_LAYERS
from midus.models import CAUSAL_LM_CLASSES, CONFIG_CLASSES, MODEL_CLASSES, MemoryBlock

FLOAT32 = TOLERANCE[torch.float32]


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_grown_model_starts_as_the_base(family, dtype, tied):
    base = tiny_base(family, tie_word_embeddings=tied).to(dtype)
    model = upscale(base, UpscaleConfig(memory=MEMORY))
    ids = prompt_ids(2, 20)
    assert torch.equal(model(ids).logits, base(ids).logits)
    assert model.dtype == dtype


@pytest.mark.parametrize(
    "options",
    [
        {"query_norm": "layer"},
        {"query_norm": "batch"},
        {"attention_residual": True},
        {"attn_output_proj": True},
        {"memory_output_proj": True},
        {"bypass": "attention"},
        {"bypass": "stream"},
        {"bypass": "both"},
        {"latent_dim": 3},
        {"key_init": "normal", "value_proj_init": "identity"},
    ],
    ids=str,
)
def test_every_option_starts_as_the_base_and_then_matters(options):
    base = tiny_base()
    memory = MemoryConfig(num_subkeys=8, **options)
    model = upscale(base, UpscaleConfig(memory=memory))
    ids = prompt_ids()
    assert torch.equal(model(ids).logits, base(ids).logits)
    assert not torch.equal(fill_tables(model)(ids).logits, base(ids).logits)


@every_family
@pytest.mark.parametrize("kind", MEMORY_LAYERS)
@each_bypass
def test_a_bypass_starts_as_the_base_and_then_matters_alone(family, kind, bypass):
    base = tiny_base(family)
    memory = MemoryConfig(kind=kind, num_subkeys=8, bypass=bypass)
    model = upscale(base, UpscaleConfig(memory=memory))
    ids = prompt_ids()
    assert torch.equal(model(ids).logits, base(ids).logits)
    for position in model.config.memory_positions:
        torch.nn.init.normal_(model.model.layers[position].bypass.weight)
    assert relative_error(model(ids).logits, base(ids).logits) > 1e-2


@every_family
@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_every_memory_layer_starts_as_the_base_and_survives_a_save(tmp_path, family, kind):
    base = tiny_base(family)
    model = upscale(base, UpscaleConfig(memory=MemoryConfig(kind=kind, num_subkeys=8)))
    ids = prompt_ids()
    assert torch.equal(model(ids).logits, base(ids).logits)
    fill_tables(model)
    logits = model(ids).logits
    assert not torch.equal(logits, base(ids).logits)
    model.save_pretrained(tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert torch.equal(loaded(ids).logits, logits)
    cached, cached_logits = step_logits(loaded, ids, use_cache=True)
    plain, plain_logits = step_logits(loaded, ids, use_cache=False)
    assert torch.equal(cached, plain)
    assert relative_error(cached_logits, plain_logits) < FLOAT32


def test_a_fresh_ultramem_has_its_permutation():
    memory = MemoryConfig(kind="ultramem", num_subkeys=8)
    config = upscale(tiny_base(), UpscaleConfig(memory=memory)).config
    permutation = CAUSAL_LM_CLASSES["llama"](config).model.layers[1].memory.values.permutation
    assert sorted(permutation.tolist()) == list(range(4 * 64))


@pytest.mark.parametrize("num_inserted", [1, 2, 3, 4])
@pytest.mark.parametrize("placement", ["distributed", "top_heavy", "bottom_heavy"])
def test_any_number_and_placement_starts_as_the_base(num_inserted, placement):
    base = tiny_base()
    config = UpscaleConfig(num_inserted=num_inserted, placement=placement, memory=MEMORY)
    model = upscale(base, config)
    assert torch.equal(model(prompt_ids()).logits, base(prompt_ids()).logits)
    assert len(model.model.layers) == model.config.num_hidden_layers == 4 + num_inserted
    assert [block.self_attn.layer_idx for block in model.model.layers] == list(
        range(4 + num_inserted)
    )


def test_base_stays_usable_and_shares_its_weights():
    base = tiny_base()
    before = base(prompt_ids()).logits
    model = upscale(base, UpscaleConfig(memory=MEMORY))
    generated = base.generate(prompt_ids(), max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > 12
    assert torch.equal(base(prompt_ids()).logits, before)
    assert [block.self_attn.layer_idx for block in base.model.layers] == [0, 1, 2, 3]
    own, shared = base.model.layers[3].mlp.up_proj.weight, model.model.layers[5].mlp.up_proj.weight
    assert own.data_ptr() == shared.data_ptr()
    assert own.requires_grad
    assert not shared.requires_grad


def test_same_seed_same_blocks_other_seed_other_blocks():
    def keys(seed):
        model = upscale(tiny_base(), UpscaleConfig(memory=MEMORY, seed=seed))
        return [model.model.layers[p].memory.keys.row_keys for p in model.config.memory_positions]

    assert all(torch.equal(a, b) for a, b in zip(keys(5), keys(5), strict=True))
    assert not torch.equal(keys(5)[0], keys(6)[0])
    assert not torch.equal(keys(5)[0], keys(5)[1])


# Generation, with tables that are not zero.


def step_logits(model, ids, mask=None, **options):
    out = model.generate(
        ids,
        attention_mask=mask if mask is not None else torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=8,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


@every_family
@pytest.mark.parametrize("case", ["single", "left_padded", "beams"])
def test_cached_generation_equals_uncached(family, case):
    model = grown(family)
    ids = prompt_ids(1 if case == "single" else 3)
    mask = torch.ones_like(ids)
    if case == "left_padded":
        ids[1, :4] = mask[1, :4] = 0
        ids[2, :7] = mask[2, :7] = 0
    beams = 3 if case == "beams" else 1
    cached, cached_logits = step_logits(model, ids, mask, use_cache=True, num_beams=beams)
    plain, plain_logits = step_logits(model, ids, mask, use_cache=False, num_beams=beams)
    assert torch.equal(cached, plain)
    assert relative_error(cached_logits, plain_logits) < FLOAT32


@every_family
def test_static_cache_equals_dynamic(family):
    model = grown(family)
    ids = prompt_ids(2)
    # The model's own forward: generate would compile it for a static cache.
    static = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        whole = model(ids).logits
        steps = [model(ids[:, :8], past_key_values=static).logits]
        for t in range(8, 12):
            steps.append(model(ids[:, t : t + 1], past_key_values=static).logits)
    assert relative_error(torch.cat(steps, dim=1), whole) < FLOAT32


@every_family
def test_token_by_token_equals_full_sequence(family):
    """Rotary positions, layer_idx and the cache agree block by block."""
    model = grown(family)
    ids = prompt_ids(1, 14)
    with torch.no_grad():
        whole = model(ids).logits
        cache, pieces = None, []
        for t in range(ids.shape[1]):
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
    assert relative_error(torch.cat(pieces, dim=1), whole) < FLOAT32


def test_bfloat16_top_k_flips_are_reported_not_asserted(record_property):
    """Close scores may swap in bfloat16 when the cache changes the order of a sum."""
    model = grown().to(torch.bfloat16)
    ids = prompt_ids(1)
    cached, cached_logits = step_logits(model, ids, use_cache=True)
    plain, _ = step_logits(model, ids, use_cache=False)
    differing = (cached != plain).nonzero()
    if len(differing):
        first = int(differing[0, 1])
        top = cached_logits[first - ids.shape[1], 0].float().topk(2).values
        record_property("first_differing_token", first)
        record_property("margin", (top[0] - top[1]).item())
    assert torch.isfinite(cached_logits).all()


@every_family
def test_compiled_fullgraph_equals_eager(family):
    model = grown(family)
    ids = prompt_ids(2)
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(
            ids, use_cache=False
        ).logits
    assert relative_error(compiled, eager) < FLOAT32


@pytest.mark.slow
def test_inductor_fullgraph_equals_eager():
    model = grown()
    ids = prompt_ids(2)
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
    assert relative_error(compiled, eager) < FLOAT32


# Training.


def gradients(model, ids):
    model.zero_grad()
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@every_family
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_equal_gradients(family, reentrant):
    model = grown(family)
    ids = prompt_ids(2)
    plain = {name: grad.clone() for name, grad in gradients(model, ids).items()}
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert all(block.gradient_checkpointing for block in model.model.layers)
    checkpointed = gradients(model, ids)
    assert all(torch.equal(checkpointed[name], plain[name]) for name in plain)


@each_bypass
def test_a_bypass_is_the_same_checkpointed_and_compiled(bypass):
    model, ids = grown(memory=MemoryConfig(num_subkeys=8, bypass=bypass)), prompt_ids(2)
    eager = model(ids, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False)
    assert relative_error(compiled.logits, eager) < FLOAT32
    plain = {name: grad.clone() for name, grad in gradients(model, ids).items()}
    assert all(
        plain[f"model.layers.{p}.bypass.weight"].any() for p in model.config.memory_positions
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradients(model, ids)
    assert all(torch.equal(checkpointed[name], plain[name]) for name in plain)


@each_bypass
def test_a_bypass_learns_under_autocast(bypass):
    model, ids = grown(memory=MemoryConfig(num_subkeys=8, bypass=bypass)), prompt_ids(2)
    for position in model.config.memory_positions if bypass == "joined" else ():
        # It reads the memory, whose slots chosen in bfloat16 may be others: they hold less here.
        model.model.layers[position].memory.values.latent_values.data.mul_(0.1)
    expected = gradients(model, ids)["model.layers.1.bypass.weight"].clone()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, ids)["model.layers.1.bypass.weight"]
    assert found.dtype == torch.float32
    assert relative_error(found, expected) < 0.1  # products in bfloat16, through six blocks


def test_gradient_checkpointing_set_in_the_config_reaches_every_block():
    config = grown().config
    config.gradient_checkpointing = True
    model = CAUSAL_LM_CLASSES["llama"](config)
    assert all(block.gradient_checkpointing for block in model.model.layers)


@every_family
@every_bypass
def test_only_what_is_zero_learns_at_first_then_everything_inserted(family, bypass):
    memory = MemoryConfig(num_subkeys=8, top_k=4, bypass=bypass)
    model = grown(family, filled=False, memory=memory)
    ids = prompt_ids(2)
    inserted = {
        name
        for name, _ in model.named_parameters()
        if any(f"layers.{p}." in name for p in model.config.memory_positions)
    }
    assert {n for n, p in model.named_parameters() if p.requires_grad} == inserted
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    moved = {n for n, grad in gradients(model, ids).items() if grad is not None and grad.any()}
    zero = ("bypass.weight",) if bypass == "joined" else ("latent_values", "bypass.weight")
    assert moved == {name for name in inserted if name.endswith(zero)}
    number = 1 if bypass in ("none", "joined") else 2
    assert len(moved) == len(model.config.memory_positions) * number
    optimizer.step()
    if bypass == "joined":  # the table stands behind W_b, and what finds its slots behind the table
        moved = {n for n, grad in gradients(model, ids).items() if grad is not None and grad.any()}
        assert {name for name in inserted if name.endswith("latent_values")} <= moved < inserted
        optimizer.step()
    moved = {n for n, grad in gradients(model, ids).items() if grad is not None and grad.any()}
    assert moved == inserted
    assert all(p.grad is None for n, p in model.named_parameters() if n not in inserted)


def test_top_1_warns_that_keys_will_not_train():
    memory = MemoryConfig(num_subkeys=8, top_k=1)
    with pytest.warns(UserWarning, match="keys and q/k/v"):
        model = upscale(tiny_base(), UpscaleConfig(memory=memory))
    grads = gradients(fill_tables(model), prompt_ids())
    still = {n.split("layers.1.")[1] for n, g in grads.items() if "layers.1." in n and not g.any()}
    assert {"memory.keys.row_keys", "memory.keys.col_keys", "self_attn.q_proj.weight"} <= still
    assert "memory.values.value_proj" not in still


def test_top_1_with_a_bypass_of_attention_warns_of_the_keys_alone():
    memory = MemoryConfig(num_subkeys=8, top_k=1, bypass="attention")
    with pytest.warns(UserWarning, match="keys receive no gradient; q/k/v .* bypass alone"):
        model = upscale(tiny_base(), UpscaleConfig(memory=memory))
    grads = gradients(fill_tables(model), prompt_ids())
    still = {n.split("layers.1.")[1] for n, g in grads.items() if "layers.1." in n and not g.any()}
    assert still == {"memory.keys.row_keys", "memory.keys.col_keys"}


def test_top_1_with_a_bypass_of_the_stream_warns_of_keys_and_attention():
    memory = MemoryConfig(num_subkeys=8, top_k=1, bypass="stream")
    with pytest.warns(UserWarning, match=r"keys and q/k/v .* and the bypass will train"):
        model = upscale(tiny_base(), UpscaleConfig(memory=memory))
    grads = gradients(fill_tables(model), prompt_ids())
    still = {n.split("layers.1.")[1] for n, g in grads.items() if "layers.1." in n and not g.any()}
    attention = {f"self_attn.{name}_proj.weight" for name in "qkv"}
    assert still == {"memory.keys.row_keys", "memory.keys.col_keys"} | attention


# What transformers expects of its classes.


@each_bypass
def test_a_fresh_bypass_from_config_is_zero(bypass):
    config = grown(memory=MemoryConfig(num_subkeys=8, bypass=bypass)).config
    weight = AutoModelForCausalLM.from_config(config).model.layers[1].bypass.weight
    assert weight.shape == (32, 64 if bypass == "both" else 32)
    assert not weight.any()


def test_hidden_states_and_attentions_cover_every_block():
    model = grown(attn_implementation="eager")
    out = model(prompt_ids(), output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 7
    assert len(out.attentions) == 6


@every_family
def test_class_conventions(family):
    causal_lm, decoder = CAUSAL_LM_CLASSES[family], MODEL_CLASSES[family]
    assert GenerationMixin in causal_lm.__bases__
    assert all(isinstance(value, list) for value in causal_lm._can_record_outputs.values())
    assert "MemoryBlock" in causal_lm._no_split_modules
    config_class = CONFIG_CLASSES[family]
    assert causal_lm.config_class is decoder.config_class is config_class
    assert isinstance(AutoConfig.for_model(f"midus_{family}"), config_class)
    config = grown(family).config
    assert type(AutoModel.from_config(config)) is decoder
    assert type(AutoModelForCausalLM.from_config(config)) is causal_lm


def test_fresh_model_from_config_has_initialised_memory():
    model = AutoModelForCausalLM.from_config(grown().config)
    memory = model.model.layers[1].memory
    assert model.model.layers[1].bypass is None
    assert not memory.values.latent_values.any()
    assert memory.values.value_proj.std() > 0.1
    assert memory.keys.row_keys.std() > 0.1


@every_family
def test_tied_embeddings_stay_tied(family):
    model = grown(family, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    copied = copy.deepcopy(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


def test_casting_and_copying_keep_the_output():
    model = grown()
    ids = prompt_ids()
    logits = model(ids).logits
    assert torch.equal(copy.deepcopy(model)(ids).logits, logits)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(ids).logits.dtype == torch.bfloat16


def test_vocabulary_can_be_resized():
    model = grown()
    model.resize_token_embeddings(120)
    assert model(prompt_ids()).logits.shape[-1] == 120


def test_memory_blocks_are_where_the_config_says():
    model = grown()
    kinds = [isinstance(block, MemoryBlock) for block in model.model.layers]
    assert [i for i, is_memory in enumerate(kinds) if is_memory] == model.config.memory_positions

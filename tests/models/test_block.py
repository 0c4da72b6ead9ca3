import pytest
import torch
from tiny import each_bypass, every_family, fill_tables, grown, prompt_ids, tiny_base

from midus import MemoryConfig, MidusError, UpscaleConfig, upscale
from midus.models import MemoryBlock


def run_block(model, position, hidden_states):
    """One block of a model on its own, causally, as the model would call it."""
    config = model.config
    positions = torch.arange(hidden_states.shape[1]).unsqueeze(0)
    rotary = model.model.rotary_emb
    args = (config.layer_types[position],) if isinstance(rotary.rope_type, dict) else ()
    return model.model.layers[position](
        hidden_states,
        attention_mask=None,
        position_embeddings=rotary(hidden_states, positions, *args),
    )


@every_family
def test_fresh_memory_block_is_identity(family):
    model = grown(family, filled=False)
    hidden_states = torch.randn(2, 6, 32)
    for position in model.config.memory_positions:
        out = run_block(model, position, hidden_states)
        assert torch.equal(out.view(torch.int32), hidden_states.view(torch.int32))


@every_family
def test_correction_is_the_memory_of_the_anchors_attention(family):
    """M(x) = x + Mem(Attn'(LN(x))), with Attn' and LN taken from the anchor in the base."""
    base = tiny_base(family)
    model = fill_tables(upscale(base, UpscaleConfig(memory=MemoryConfig(num_subkeys=8))))
    position, anchor = model.config.memory_positions[0], 1
    hidden_states = torch.randn(1, 6, 32)

    heads = []
    anchor_block = base.model.layers[anchor]
    hook = anchor_block.self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: heads.append(args[0])
    )
    positions = torch.arange(6).unsqueeze(0)
    rotary = base.model.rotary_emb
    args = (base.config.layer_types[anchor],) if isinstance(rotary.rope_type, dict) else ()
    anchor_block(
        hidden_states,
        attention_mask=None,
        position_embeddings=rotary(hidden_states, positions, *args),
    )
    hook.remove()
    expected = hidden_states + model.model.layers[position].memory(heads[0])
    assert torch.equal(run_block(model, position, hidden_states), expected)
    assert not torch.equal(expected, hidden_states)


@every_family
def test_block_holds_copies_of_its_anchor_and_nothing_else_of_it(family):
    base = tiny_base(family)
    model = upscale(base, UpscaleConfig(memory=MemoryConfig(num_subkeys=8)))
    block = model.model.layers[1]
    assert isinstance(block, MemoryBlock)
    anchor = base.model.layers[1].state_dict()
    names = {name for name in block.state_dict() if not name.startswith("memory.")}
    attention = {n for n in anchor if n.startswith("self_attn.") and "o_proj" not in n}
    assert names == attention | ({"input_layernorm.weight"} & set(anchor))
    for name in names:
        own = block.state_dict()[name]
        assert torch.equal(own, anchor[name])
        assert own.data_ptr() != anchor[name].data_ptr()


def test_attention_residual_reads_input_plus_attention():
    plain = grown(memory=MemoryConfig(num_subkeys=8))
    residual = grown(memory=MemoryConfig(num_subkeys=8, attention_residual=True))
    hidden_states = torch.randn(1, 5, 32)
    seen = []
    for model in (plain, residual):
        hook = model.model.layers[1].memory.register_forward_pre_hook(
            lambda module, args: seen.append(args[0])
        )
        run_block(model, 1, hidden_states)
        hook.remove()
    assert torch.equal(seen[1], hidden_states + seen[0])


def test_attn_output_proj_is_the_anchors():
    base = tiny_base()
    memory = MemoryConfig(num_subkeys=8, attn_output_proj=True)
    model = upscale(base, UpscaleConfig(memory=memory))
    assert torch.equal(
        model.model.layers[1].self_attn.o_proj.weight, base.model.layers[1].self_attn.o_proj.weight
    )


def test_memory_output_proj_starts_as_identity():
    plain = grown(memory=MemoryConfig(num_subkeys=8))
    projected = grown(memory=MemoryConfig(num_subkeys=8, memory_output_proj=True))
    assert torch.equal(projected.model.layers[1].memory_output_proj.weight, torch.eye(32))
    ids = prompt_ids()
    torch.testing.assert_close(projected(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


BYPASSED = {
    "hml": {},
    "residual": {"attention_residual": True},
    "kept output projection": {"attn_output_proj": True, "memory_output_proj": True},
    "pkm": {"kind": "pkm"},
    "linear": {"kind": "linear"},
    "ultramem": {"kind": "ultramem"},
}


@pytest.mark.parametrize("case", BYPASSED)
@pytest.mark.parametrize(
    ("bypass", "family"),
    [("attention", "llama"), ("stream", "llama"), ("both", "llama"), ("stream", "olmo2")],
)
def test_a_bypass_adds_its_product_beside_the_memory(case, bypass, family):
    """M(x) = x + P Mem(r) + W_b b, with r = a', or x + a' where the residual is added.

    b is a', or LN(x), or one after the other; where OLMo 2 has no norm, x stands for LN(x).
    """
    memory = MemoryConfig(num_subkeys=8, bypass=bypass, **BYPASSED[case])
    model = grown(family, memory=memory)
    block, hidden_states, seen = model.model.layers[1], torch.randn(1, 5, 32), {}
    normed = hidden_states
    if family == "llama":
        torch.nn.init.normal_(block.input_layernorm.weight)
        scale = (hidden_states.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        normed = block.input_layernorm.weight * hidden_states * scale
    projection = torch.eye(32)
    if memory.memory_output_proj:
        torch.nn.init.normal_(block.memory_output_proj.weight)
        projection = block.memory_output_proj.weight
    block.self_attn.register_forward_hook(lambda module, args, out: seen.update(attended=out[0]))
    block.memory.register_forward_hook(
        lambda module, args, out: seen.update(read=args[0], written=out)
    )
    found = run_block(model, 1, hidden_states)
    attended = seen["attended"]
    read = hidden_states + attended if memory.attention_residual else attended
    assert torch.equal(seen["read"], read)
    both = torch.cat((attended, normed), dim=-1)
    beside_of = {"attention": attended, "stream": normed, "both": both}[bypass]
    beside = torch.einsum("btc,dc->btd", beside_of, block.bypass.weight)
    expected = hidden_states + torch.einsum("btc,dc->btd", seen["written"], projection) + beside
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert beside.abs().mean() > 0.1
    assert seen["written"].abs().mean() > 0.01


@pytest.mark.parametrize("case", [name for name, own in BYPASSED.items() if len(own) < 2])
def test_a_joined_bypass_maps_what_attention_and_memory_found(case):
    """M(x) = x + W_b (a' + Mem(r)), with r = a', or x + a' where the residual is added."""
    memory = MemoryConfig(num_subkeys=8, bypass="joined", **BYPASSED[case])
    model = grown(memory=memory)
    block, hidden_states, seen = model.model.layers[1], torch.randn(1, 5, 32), {}
    block.self_attn.register_forward_hook(lambda module, args, out: seen.update(attended=out[0]))
    block.memory.register_forward_hook(
        lambda module, args, out: seen.update(read=args[0], written=out)
    )
    found = run_block(model, 1, hidden_states)
    attended = seen["attended"]
    assert torch.equal(
        seen["read"], hidden_states + attended if memory.attention_residual else attended
    )
    added = torch.einsum("btc,dc->btd", attended + seen["written"], block.bypass.weight)
    torch.testing.assert_close(found, hidden_states + added, rtol=1e-4, atol=1e-4)
    assert block.memory_map is block.bypass.weight


def test_a_joined_bypass_is_refused_where_it_cannot_be():
    with pytest.raises(MidusError, match="would map it twice; leave one of them out"):
        MemoryConfig(bypass="joined", memory_output_proj=True)
    memory = MemoryConfig(num_subkeys=8, bypass="joined")
    with pytest.raises(MidusError, match=r"bypass='joined' .*4 heads of 16: 64 wide"):
        upscale(tiny_base("qwen3", head_dim=16), UpscaleConfig(memory=memory))
    both = MemoryConfig(num_subkeys=8, bypass="joined", attn_output_proj=True)
    upscale(tiny_base("qwen3", head_dim=16), UpscaleConfig(memory=both))


@each_bypass
def test_a_bypass_changes_nothing_else_that_a_block_starts_with(bypass):
    base = tiny_base()
    plain, bypassed = (
        upscale(base, UpscaleConfig(memory=MemoryConfig(num_subkeys=8, bypass=chosen)))
        for chosen in ("none", bypass)
    )
    own = bypassed.model.layers[1].state_dict()
    assert not own.pop("bypass.weight").any()
    others = plain.model.layers[1].state_dict()
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own)


@pytest.mark.parametrize(("bypass", "width"), [("attention", 64), ("stream", 32), ("both", 96)])
def test_a_bypass_reads_heads_wider_than_the_stream_or_the_stream(bypass, width):
    memory = MemoryConfig(num_subkeys=8, bypass=bypass)
    fresh = grown("qwen3", filled=False, memory=memory, head_dim=16)
    assert fresh.model.layers[1].bypass.weight.shape == (32, width)
    base = tiny_base("qwen3", head_dim=16)
    assert torch.equal(fresh(prompt_ids()).logits, base(prompt_ids()).logits)


@pytest.mark.parametrize("value", ["yes", True, None])
def test_a_bypass_of_something_else_is_refused(value):
    message = f"bypass={value!r} is unknown; choose one of none, attention, stream, both, joined"
    with pytest.raises(MidusError, match=message):
        MemoryConfig(bypass=value)


def test_heads_wider_than_their_slice_of_the_output():
    """As in Qwen3-0.6B: queries are head_dim wide, each head writes hidden_size // num_heads."""
    model = grown("qwen3", head_dim=16)
    memory = model.model.layers[1].memory
    assert memory.keys.row_keys.shape == (4, 8, 8)
    assert memory.values.value_proj.shape == (4, 8, 8)
    fresh = grown("qwen3", filled=False, head_dim=16)
    base = tiny_base("qwen3", head_dim=16)
    assert torch.equal(fresh(prompt_ids()).logits, base(prompt_ids()).logits)


def test_attention_residual_is_refused_where_widths_differ():
    memory = MemoryConfig(num_subkeys=8, attention_residual=True)
    with pytest.raises(MidusError, match=r"4 heads of 16: 64 wide"):
        upscale(tiny_base("qwen3", head_dim=16), UpscaleConfig(memory=memory))
    both = MemoryConfig(num_subkeys=8, attention_residual=True, attn_output_proj=True)
    upscale(tiny_base("qwen3", head_dim=16), UpscaleConfig(memory=both))

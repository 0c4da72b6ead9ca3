"""Whatever is done to a block between two tokens, the next one goes as its plain path says."""

import copy
import pickle

import pytest
import torch
from tiny import TOLERANCE, grown, prompt_ids, relative_error
from torch import nn
from torch.nn.utils import parametrize
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from midus.models import fused

PARTS = [
    "self_attn",
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "input_layernorm",
    "head_outputs",
    "memory",
    "memory.query_proj",
    "memory.query_norm",
    "memory_output_proj",
]


@pytest.fixture
def steps(count_steps):
    return count_steps(fused, "project_token", "attend_and_read")


@pytest.fixture
def model():
    model = grown().eval()
    model.build_value_cache()
    return model


def first_block(model):
    return model.model.layers[model.config.memory_positions[0]]


def part_of(block, name):
    for step in name.split("."):
        block = getattr(block, step)  # `o_proj` is no registered part
    return block


def decode(model):
    """Logits of a prompt's last token and of two tokens after it."""
    cache = DynamicCache(config=model.config)
    ids = prompt_ids(1)
    with torch.no_grad():
        logits = [model(ids, past_key_values=cache).logits[:, -1]]
        for token in (5, 7):
            out = model(torch.tensor([[token]]), past_key_values=cache)
            logits.append(out.logits[:, -1])
    return torch.stack(logits)


def decode_plainly(model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_DEVICES", ())
        return decode(model)


def check_after(change, model, steps, monkeypatch, streams=1, reads=1, differs=True):
    """Decodes, changes the first of two blocks, and decodes again: as the plain path does.

    ``streams`` and ``reads`` say how many of the blocks then still take each kernel.
    """
    before = decode(model)
    assert steps == {"project_token": 2 * 2, "attend_and_read": 2 * 2}
    change(first_block(model))
    after = decode(model)
    assert steps == {"project_token": 2 * (2 + streams), "attend_and_read": 2 * (2 + reads)}
    expected = decode_plainly(model, monkeypatch)
    assert relative_error(after, expected) < TOLERANCE[torch.float32]
    assert (relative_error(after, before) > TOLERANCE[torch.float32]) == differs


def doubled(out):
    return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


@pytest.mark.parametrize("part", PARTS)
def test_a_hook_added_later_is_called(part, model, steps, monkeypatch):
    def add(block):
        part_of(block, part).register_forward_hook(lambda module, args, out: doubled(out))

    reads = 2 if part in ("self_attn.q_proj", "self_attn.v_proj") else 1
    check_after(add, model, steps, monkeypatch, reads=reads)


def test_a_hook_is_called_whose_dictionary_is_new(model, steps, monkeypatch):
    def add(block):
        norm = block.input_layernorm
        norm._forward_hooks = type(norm._forward_hooks)()
        norm.register_forward_hook(lambda module, args, out: 2 * out)

    check_after(add, model, steps, monkeypatch)


@pytest.mark.parametrize("part", PARTS)
def test_a_forward_set_later_is_called(part, model, steps, monkeypatch):
    def put(block):
        module = part_of(block, part)
        own = module.forward
        module.forward = lambda *args, **kwargs: doubled(own(*args, **kwargs))

    reads = 2 if part in ("self_attn.q_proj", "self_attn.v_proj") else 1
    check_after(put, model, steps, monkeypatch, reads=reads)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_listens_to_tables_keeps_the_kernels_away(part, model, steps, monkeypatch):
    def add(block):
        getattr(block.memory, part).register_forward_pre_hook(lambda *_: None)

    check_after(add, model, steps, monkeypatch, differs=False)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(("linear_class", "streams"), [(nn.Linear, 2), (Doubled, 1)])
def test_a_projection_put_in_later_is_used(linear_class, streams, model, steps, monkeypatch):
    def put(block):
        block.self_attn.q_proj = linear_class(32, 32, bias=False)

    check_after(put, model, steps, monkeypatch, streams=streams, reads=2)


@pytest.mark.parametrize("part", ["memory_output_proj", "bypass"])
def test_a_module_put_where_nothing_was_is_called(part, model, steps, monkeypatch):
    def put(block):
        setattr(block, part, nn.Linear(32, 32))

    check_after(put, model, steps, monkeypatch)


def test_a_parametrization_added_later_counts(model, steps, monkeypatch):
    def add(block):
        parametrize.register_parametrization(block.self_attn.k_proj, "weight", Twice())

    check_after(add, model, steps, monkeypatch, reads=2)


def test_a_weight_that_is_no_parameter_any_more_counts(model, steps, monkeypatch):
    def replace(block):
        linear = block.self_attn.v_proj
        weight = linear.weight.detach()
        del linear.weight
        linear.weight = 2 * weight

    check_after(replace, model, steps, monkeypatch, reads=2)


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "input_layernorm.weight"])
@pytest.mark.parametrize("way", ["parameter", "data", "in_place"])
def test_new_weights_are_read(name, way, model, steps, monkeypatch):
    owner, _, own_name = name.rpartition(".")

    def replace(block):
        module = block.get_submodule(owner)
        weight = getattr(module, own_name)
        new = torch.randn_like(weight)
        if way == "parameter":
            setattr(module, own_name, nn.Parameter(new))
        elif way == "data":
            weight.data = new
        else:
            with torch.no_grad():
                weight.copy_(new)

    check_after(replace, model, steps, monkeypatch, streams=2, reads=2)


def transposed(weight):
    return torch.randn_like(weight).transpose(0, -1).contiguous().transpose(0, -1)


def test_weights_that_lie_otherwise_are_read_by_the_plain_projections(model, steps, monkeypatch):
    def replace(block):
        block.self_attn.q_proj.weight.data = transposed(block.self_attn.q_proj.weight)

    check_after(replace, model, steps, monkeypatch, reads=2)


def test_keys_that_lie_otherwise_are_read_by_the_plain_path(model, steps, monkeypatch):
    def replace(block):
        block.memory.keys.row_keys.data = transposed(block.memory.keys.row_keys)

    check_after(replace, model, steps, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_another_type_are_not_read_by_the_kernel(dtype, model, steps):
    decode(model)
    block, tokens = first_block(model), torch.zeros(1, 1, 32)
    layer = DynamicLayer()
    layer.update(tokens, tokens)
    assert fused.can_stream(block, tokens, layer)
    weight = block.self_attn.k_proj.weight
    weight.data = weight.data.to(dtype)
    assert not fused.can_stream(block, tokens, layer)


@pytest.mark.parametrize("name", ["latent_values", "value_proj"])
@pytest.mark.parametrize("way", ["data", "in_place"])
def test_tables_changed_later_are_read(name, way, model, steps, monkeypatch):
    def change(block):
        weight = getattr(block.memory.values, name)
        if way == "data":
            weight.data = 2 * weight.data
        else:
            with torch.no_grad():
                weight.mul_(2)

    check_after(change, model, steps, monkeypatch)


def test_another_attention_and_gates_set_later_count(model, steps, monkeypatch):
    decode(model)
    first = model.config.memory_positions[0]
    model.set_memory_gates({first: 0.5})
    assert (
        relative_error(decode(model), decode_plainly(model, monkeypatch)) < TOLERANCE[torch.float32]
    )
    assert steps["attend_and_read"] == 4 + 2
    model.set_memory_gates({})
    model.set_attn_implementation("eager")
    decode(model)
    assert steps["attend_and_read"] == 4 + 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_weights_of_its_own(duplicate, model, steps, monkeypatch):
    before = decode(model)
    other = duplicate(model)
    other.build_value_cache()
    assert torch.equal(decode(other), before)
    with torch.no_grad():
        first_block(other).self_attn.q_proj.weight.normal_()
    count = steps["project_token"]
    after = decode(other)
    assert steps["project_token"] == count + 4
    assert relative_error(after, before) > TOLERANCE[torch.float32]
    assert relative_error(after, decode_plainly(other, monkeypatch)) < TOLERANCE[torch.float32]
    assert torch.equal(decode(model), before)


def test_a_model_of_another_type_is_decoded_in_that_type(model, steps, monkeypatch):
    decode(model)
    for count, dtype in enumerate((torch.float64, torch.float16, torch.float32), 2):
        model.to(dtype)
        model.build_value_cache()
        logits = decode(model)
        assert steps["project_token"] == 4 * count
        assert logits.dtype == dtype
        if dtype != torch.float16:  # whose roundings differ between the paths
            expected = decode_plainly(model, monkeypatch)  # with a norm in float32 at any rate
            assert relative_error(logits, expected) < TOLERANCE[torch.float32]


def test_other_weights_loaded_later_are_read(model, steps, monkeypatch):
    before = decode(model)
    model.load_state_dict({k: 1.5 * v for k, v in model.state_dict().items()})
    model.build_value_cache()
    after = decode(model)
    assert steps["project_token"] == 8
    assert relative_error(after, before) > TOLERANCE[torch.float32]
    assert relative_error(after, decode_plainly(model, monkeypatch)) < TOLERANCE[torch.float32]


def test_borrowed_weights_are_read(model, steps, monkeypatch):
    before = decode(model)
    name = f"model.layers.{model.config.memory_positions[0]}.self_attn.q_proj.weight"
    borrowed = {name: torch.randn_like(model.get_parameter(name))}
    ids = prompt_ids(1)

    def borrow():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            call = {"input_ids": torch.tensor([[5]]), "past_key_values": cache}
            return torch.func.functional_call(model, borrowed, (), call).logits[:, -1]

    found = borrow()
    assert steps["project_token"] == 6
    assert relative_error(found, before[1]) > TOLERANCE[torch.float32]
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_DEVICES", ())
        assert relative_error(found, borrow()) < TOLERANCE[torch.float32]

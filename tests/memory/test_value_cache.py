"""The head-wise value cache: equal to the plain path, never saved, never stale."""

import copy
import io

import pytest
import torch
from tiny import fill_tables, grown, prompt_ids, relative_error

from midus import MemoryConfig
from midus.memory import HeadwiseMemory
from midus.memory import hml as hml_module


@pytest.fixture
def layer():
    torch.manual_seed(0)
    config = MemoryConfig(num_subkeys=8, top_k=4, latent_dim=6)
    return fill_tables(HeadwiseMemory(config, 32, 4, 32)).eval()


@pytest.fixture
def attended():
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def cached_calls(monkeypatch):
    calls = []
    real = hml_module.headwise_memory_cached
    monkeypatch.setattr(
        hml_module, "headwise_memory_cached", lambda *args: calls.append(1) or real(*args)
    )
    return calls


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_cached_equals_plain(layer, attended, cached_calls, dtype, limit):
    layer, attended = layer.to(dtype), attended.to(dtype)
    with torch.no_grad():
        plain = layer(attended)
        assert not cached_calls  # nothing is cached unasked
        layer.values.build_cache()
        cached = layer(attended)
    assert cached_calls
    assert layer.values.value_cache.shape == (4, 64, 8)
    error = (cached - plain).float().norm() / plain.float().norm()
    assert error < limit


def test_with_gradients_the_plain_path_runs(layer, attended, cached_calls):
    layer.values.build_cache()
    layer(attended).sum().backward()
    assert not cached_calls
    assert layer.values.latent_values.grad.any()


def test_train_drops_it_and_eval_keeps_it(layer):
    layer.values.build_cache()
    layer.eval()
    assert layer.values.value_cache is not None
    layer.train()
    assert layer.values.value_cache is None


def change_in_place(layer):
    with torch.no_grad():
        layer.values.value_proj.mul_(2)


def load_others(layer):
    layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()})


def replace_data(layer):
    layer.values.latent_values.data = layer.values.latent_values.data * 2


def step(layer):
    torch.optim.SGD(layer.values.parameters(), lr=1.0).step()


@pytest.mark.parametrize("change", [change_in_place, load_others, replace_data, step])
def test_changed_weights_are_noticed(layer, attended, change):
    layer(attended).square().sum().backward()  # gradients for the optimizer
    layer.values.build_cache()
    with torch.no_grad():
        before = layer(attended)
        change(layer)
        after = layer(attended)
        assert layer.values.value_cache is None
        layer.values.build_cache()
        again = layer(attended)
    assert relative_error(after, before) > 0.1
    assert relative_error(again, after) < 1e-5


def test_replaced_memory_at_the_same_address_is_noticed(layer, attended):
    # The cache holds on to the memory it was made from, so no other tensor can lie there.
    for _ in range(20):
        layer.values.build_cache()
        layer.values.latent_values.data = layer.values.latent_values.data * -1.1
        assert layer.values.fresh_cache() is None


def test_building_again_sees_what_was_written_through_data(layer, attended):
    with torch.no_grad():
        layer.values.build_cache()
        layer.values.latent_values.data.mul_(2)
        layer.values.build_cache()
        cached = layer(attended)
        layer.values.drop_cache()
        assert relative_error(cached, layer(attended)) < 1e-5


def test_a_compiled_layer_sees_a_loaded_state(layer, attended):
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        layer.values.build_cache()
        compiled(attended)
        load_others(layer)
        assert relative_error(compiled(attended), layer(attended)) < 1e-5


@pytest.mark.parametrize("built_inside", [False, True])
def test_autocast_neither_makes_nor_reads_it_in_its_own_type(layer, attended, built_inside):
    with torch.no_grad():
        plain = layer(attended)
        with torch.autocast("cpu", torch.bfloat16, enabled=built_inside):
            layer.values.build_cache()
        assert layer.values.value_cache.dtype == torch.float32
        assert relative_error(layer(attended), plain) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(attended).dtype == torch.bfloat16


def test_borrowed_weights_do_not_meet_it(layer, attended):
    with torch.no_grad():
        layer.values.build_cache()
        doubled = {name: 2 * p for name, p in layer.named_parameters()}
        called = torch.func.functional_call(layer, doubled, (attended,))
        assert layer.values.value_cache is not None
        load = copy.deepcopy(layer)
        load.load_state_dict(doubled)
        assert torch.equal(called, load(attended))


def test_weights_without_a_count_of_writes_have_none():
    with torch.inference_mode():
        layer = HeadwiseMemory(MemoryConfig(num_subkeys=8), 32, 4, 32).eval()
    layer.values.build_cache()
    assert layer.values.value_cache is None


def test_a_move_drops_it(layer):
    layer.values.build_cache()
    layer.double()
    assert layer.values.value_cache is None


def test_it_is_never_saved_or_copied(layer):
    names = set(layer.state_dict())
    layer.values.build_cache()
    assert set(layer.state_dict()) == names
    assert copy.deepcopy(layer).values.value_cache is None
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).values.value_cache is None
    assert layer.values.value_cache is not None


def test_building_again_keeps_the_same_memory(layer):
    layer.values.build_cache()
    where = layer.values.value_cache.data_ptr()
    layer.values.build_cache()
    assert layer.values.value_cache.data_ptr() == where


def test_whole_model_builds_and_drops(cached_calls):
    model = grown().eval()
    ids = prompt_ids(2)
    with torch.no_grad():
        plain = model(ids).logits
        model.build_value_cache()
        cached = model(ids).logits
        assert cached_calls
        cached_calls.clear()
        model.drop_value_cache()
        assert torch.equal(model(ids).logits, plain)
    assert not cached_calls
    assert relative_error(cached, plain) < 1e-5


def test_compiled_model_uses_it():
    model = grown().eval()
    ids = prompt_ids(2)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        model.build_value_cache()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative_error(compiled(ids, use_cache=False).logits, plain) < 1e-5

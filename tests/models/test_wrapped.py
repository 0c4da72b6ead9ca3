"""Models inside of others train, save and grow as they would alone, or say why not."""

import pytest
import torch
from safetensors.torch import load_file
from tiny import grown, load, save_base, tiny_base

from midus import MidusError, UpscaleConfig, lora_targets, set_trainable, upscale
from midus.models.delta import save_delta


def wrap(model, kind):
    return torch.compile(model) if kind == "compile" else torch.nn.DataParallel(model)


@pytest.fixture
def model(tmp_path):
    save_base(tmp_path / "base")
    return upscale(load(tmp_path / "base"), UpscaleConfig())


@pytest.mark.parametrize("kind", ["compile", "DataParallel"])
def test_what_is_wrapped_trains_and_is_saved_as_it_is_alone(model, tmp_path, kind):
    wrapped = wrap(model, kind)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    set_trainable(wrapped)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
    assert lora_targets(wrapped) == lora_targets(model)
    for folder, each in (("alone", model), ("wrapped", wrapped)):
        save_delta(each, tmp_path / folder, base=tmp_path / "base")
    alone, other = (load_file(tmp_path / f / "delta.safetensors") for f in ("alone", "wrapped"))
    assert alone.keys() == other.keys()
    assert all(torch.equal(alone[name], other[name]) for name in alone)


@pytest.mark.parametrize("kind", ["compile", "DataParallel"])
def test_a_wrapped_base_is_not_grown(kind):
    with pytest.raises(MidusError, match="the base is wrapped in"):
        upscale(wrap(tiny_base(), kind))


def test_adapters_are_to_be_merged_first(tmp_path):
    peft = pytest.importorskip("peft")
    base = tiny_base()
    base.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(MidusError, match="has PEFT adapters; merge_and_unload"):
        upscale(base)
    model = grown()
    model.add_adapter(peft.LoraConfig(r=2, **lora_targets(model)))
    for act in (set_trainable, lambda m: m.save_pretrained(tmp_path / "delta", delta=True)):
        with pytest.raises(MidusError, match="has PEFT adapters"):
            act(model)
    assert not (tmp_path / "delta").exists()


def test_what_trains_is_one_of_two():
    with pytest.raises(MidusError, match="trainable='insertd' is unknown; choose one of inserted"):
        set_trainable(grown(), "insertd")


def test_a_delta_is_of_the_models_own_weights(model, tmp_path):
    for name, value in (("state_dict", model.state_dict()), ("variant", "bf16")):
        with pytest.raises(MidusError, match=f"and takes no {name}; leave one of them out"):
            model.save_pretrained(tmp_path / "delta", delta=True, **{name: value})
    assert not (tmp_path / "delta").exists()


def test_weights_of_a_variant_stand_beside_the_others(tmp_path):
    model = grown()
    model.save_pretrained(tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    for _ in range(2):
        model.half().save_pretrained(tmp_path / "out", variant="fp16")
    names = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert names == {"model.safetensors", "model.fp16.safetensors"}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_base_on_several_devices_is_not_grown_in_memory():
    base = tiny_base()
    base.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(MidusError, match="spread over 2 devices; load it on one, or grow its"):
        upscale(base)

"""A delta given to vLLM itself: what its loader gets to see."""

import pytest
import torch
from safetensors.torch import load_file
from tiny import MEMORY, fill_tables, save_base

from midus import MidusError, UpscaleConfig, load_model
from midus.models.configuration import read_config
from midus.serving.delta_weights import whole_weights
from midus.upscaling import upscale_checkpoint


@pytest.fixture
def delta(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(
        tmp_path / "base", tmp_path / "fresh", UpscaleConfig(memory=MEMORY), delta=True
    )
    fill_tables(load_model(tmp_path / "fresh")).save_pretrained(tmp_path / "delta", delta=True)
    return tmp_path / "delta"


def read(delta):
    return load_file(delta / "delta.safetensors").items()


def test_all_tensors_come_under_their_final_names(delta):
    found = dict(whole_weights(read(delta), read_config(delta)))
    expected = load_model(delta).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_tensor_of_the_base_in_the_delta_is_refused(delta):
    tensors = dict(read(delta))
    tensors["model.norm.weight"] = torch.ones(32)
    with pytest.raises(MidusError, match=r"model\.norm\.weight.*belongs to the base"):
        list(whole_weights(tensors.items(), read_config(delta)))


def test_nan_in_the_delta_is_refused(delta):
    tensors = dict(read(delta))
    next(iter(tensors.values()))[0] = torch.nan
    with pytest.raises(MidusError, match="NaN or infinity"):
        list(whole_weights(tensors.items(), read_config(delta)))


def test_another_base_is_refused_before_anything_is_read(delta):
    save_base(delta.parent / "base", seed=5)
    with pytest.raises(MidusError, match="is not the base of this model"):
        next(whole_weights(read(delta), read_config(delta)))

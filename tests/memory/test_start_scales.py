"""Scales of the keys' and the head projections' start."""

import pytest
import torch

from midus import MemoryConfig
from midus.errors import MidusError
from midus.memory import memory_layer_class


def layer(**options):
    torch.manual_seed(0)
    config = MemoryConfig(num_subkeys=8, **options)
    return memory_layer_class(config.kind)(config, 32, 4, 32)


@pytest.mark.parametrize("kind", ["hml", "pkm", "linear"])
@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_key_scale_multiplies_the_same_draw(kind, init):
    plain, scaled = layer(kind=kind, key_init=init), layer(kind=kind, key_init=init, key_scale=3.0)
    names = [name for name, _ in plain.keys.named_parameters()]
    assert names
    for name in names:
        torch.testing.assert_close(getattr(scaled.keys, name), 3 * getattr(plain.keys, name))


def test_value_proj_scale_multiplies_identity_and_normal():
    identity = layer(value_proj_init="identity", value_proj_scale=0.5).values.value_proj
    assert torch.equal(identity, 0.5 * torch.eye(8).expand(4, 8, 8))
    plain, scaled = layer(), layer(value_proj_scale=0.5)
    torch.testing.assert_close(scaled.values.value_proj, 0.5 * plain.values.value_proj)


def test_scales_are_refused_where_they_mean_nothing():
    with pytest.raises(MidusError, match="value_proj_scale=0 must be a number"):
        MemoryConfig(value_proj_scale=0)
    with pytest.raises(MidusError, match=r"key_scale=2\.0 is an option of hml, linear and pkm"):
        MemoryConfig(kind="ultramem", key_scale=2.0)
    with pytest.raises(MidusError, match=r"value_proj_scale=2\.0 is an option of hml with hive"):
        MemoryConfig(kind="pkm", value_proj_scale=2.0)

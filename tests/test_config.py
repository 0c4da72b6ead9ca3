import pytest

from midus import MemoryConfig, MidusError, UpscaleConfig
from midus.config import field_help


def test_every_option_has_one_help_text():
    for cls in (MemoryConfig, UpscaleConfig):
        texts = field_help(cls)
        assert set(texts) == set(cls.__dataclass_fields__)
        assert all(texts.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9, "num_subkeys": 8}, "top_k=9 is more than num_subkeys=8"),
        ({"top_k": None}, "top_k=None"),
        ({"num_subkeys": None}, "num_subkeys=None"),
        ({"top_k": 0}, "top_k=0 must be a whole number from 1 to"),
        ({"num_subkeys": -1}, "num_subkeys=-1"),
        ({"latent_dim": 0}, "latent_dim=0"),
        ({"query_norm": "rms"}, "query_norm='rms' is unknown; choose one of none, batch, layer"),
        ({"key_init": "zero"}, "key_init='zero'"),
        ({"value_proj_init": "zero"}, "value_proj_init='zero'"),
        ({"attention_residual": "None"}, "attention_residual='None' must be true or false"),
        ({"attn_output_proj": 1}, "attn_output_proj=1 must be true or false"),
        ({"query_proj": "no"}, "query_proj='no' must be true or false"),
        ({"memory_output_proj": None}, "memory_output_proj=None must be true or false"),
        ({"kind": ["hml"]}, "kind=.* must be a name"),
    ],
)
def test_bad_memory_options_are_refused(options, message):
    with pytest.raises(MidusError, match=message.replace("(", r"\(")):
        MemoryConfig(**options)


def test_placement_and_positions_exclude_each_other():
    with pytest.raises(MidusError, match="exclude each other"):
        UpscaleConfig(placement="top_heavy", positions=(1,))


@pytest.mark.parametrize(
    "options",
    [
        {"positions": (1.5,)},
        {"positions": ("1",)},
        {"positions": (True,)},
        {"positions": 1},
        {"seed": "x"},
        {"seed": -1},
        {"memory": {"top_k": 2}},
        {"num_inserted": 1.0},
        {"seed": None},
        {"lesa_epochs": None},
        {"ot_reg": "a"},
        {"ot_reg": float("inf")},
        {"ot_rescale": "no"},
        {"method": ["midus"]},
        {"placement": ["dense"]},
    ],
    ids=str,
)
def test_bad_up_scaling_options_are_refused(options):
    with pytest.raises(MidusError, match=f"{next(iter(options))[:8]}.*must be"):
        UpscaleConfig(**options)


def test_number_and_positions_must_agree():
    with pytest.raises(MidusError, match="num_inserted=2 does not match the 1 positions"):
        UpscaleConfig(num_inserted=2, positions=(1,))


def test_unknown_keys_are_refused():
    with pytest.raises(MidusError, match="unknown option 'topk' for MemoryConfig"):
        MemoryConfig.from_dict({"topk": 3})


def test_options_survive_a_round_trip():
    config = MemoryConfig(num_subkeys=16, query_norm="layer", latent_dim=4)
    assert MemoryConfig.from_dict(config.to_dict()) == config

"""examples/drop_blocks.py: a shallower base has the blocks that were asked for, and loads."""

import importlib.util
from pathlib import Path

import pytest
import torch

from midus.models.loading import load_model

ROOT = Path(__file__).parents[1]


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kept_blocks_are_the_bases_own(tmp_path):
    deep, shallow = tmp_path / "deep", tmp_path / "shallow"
    load_example("make_tiny_model").make_tiny_model(deep)
    load_example("drop_blocks").drop_blocks(str(deep), 3, shallow)

    base, kept = load_model(str(deep)), load_model(str(shallow))
    assert len(kept.model.layers) == kept.config.num_hidden_layers == 3
    for block, index in zip(kept.model.layers, (0, 2, 3), strict=True):
        for name, tensor in block.state_dict().items():
            assert torch.equal(tensor, base.model.layers[index].state_dict()[name])
    tokens = torch.arange(8)[None]
    assert kept(tokens).logits.shape == base(tokens).logits.shape
    assert (kept(tokens).logits - base(tokens).logits).abs().max() > 0


def test_first_and_last_block_stay():
    assert load_example("drop_blocks").spread(30, 10) == [0, 3, 6, 10, 13, 16, 19, 23, 26, 29]


@pytest.mark.parametrize("number", [1, 31])
def test_impossible_number_is_refused(number):
    with pytest.raises(SystemExit, match="from 2 to 30"):
        load_example("drop_blocks").spread(30, number)

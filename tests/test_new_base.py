"""examples/new_base.py: a base as wide and deep as asked, that loads with its tokenizer."""

import pytest
import torch
from test_drop_blocks import load_example

from midus.models.loading import load_model, load_tokenizer
from midus.training.weight_size import weight_size


def test_it_has_the_shape_that_was_asked_for_and_weights_as_transformers_starts_them(tmp_path):
    tiny, new = tmp_path / "tiny", tmp_path / "new"
    load_example("make_tiny_model").make_tiny_model(tiny)
    load_example("new_base").new_base(str(tiny), 128, 3, new)
    base = load_model(str(new))
    assert len(base.model.layers) == 3
    assert base.config.hidden_size == 128
    assert load_tokenizer(str(new)).get_vocab() == load_tokenizer(str(tiny)).get_vocab()
    assert weight_size(base) == pytest.approx(0.02, rel=0.02)
    assert torch.isfinite(base(torch.arange(8)[None]).logits).all()


@pytest.mark.parametrize("width", [32, 100])
def test_a_width_that_makes_no_heads_is_refused(width, tmp_path):
    with pytest.raises(SystemExit, match="multiple of 64"):
        load_example("new_base").new_base("x", width, 2, tmp_path)

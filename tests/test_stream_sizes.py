"""`benchmarks/stream_sizes.py` reads the stream that blocks get."""

import importlib.util
from pathlib import Path

import pytest
from tiny import prompt_ids, tiny_base

PATH = Path(__file__).parents[1] / "benchmarks" / "stream_sizes.py"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sizes_are_those_of_the_hidden_states(family):
    spec = importlib.util.spec_from_file_location("stream_sizes", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, ids = tiny_base(family), prompt_ids(3, 16)
    states = model(ids, output_hidden_states=True).hidden_states
    expected = [
        state[:, module.FIRST :].square().mean(-1).sqrt().flatten().median().item()
        for state in states[:-1]  # the last one is what the head reads
    ]
    assert module.stream_sizes(model, ids) == pytest.approx(expected)
    assert not any(block._forward_pre_hooks for block in model.model.layers)

"""`benchmarks/gradient_paths.py` finds what was planted, and nothing where nothing was."""

import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[1] / "benchmarks" / "gradient_paths.py"
NUM_TOKENS, NUM_HEADS, WIDTH = 6_000, 2, 16


@pytest.fixture(scope="module")
def paths():
    spec = importlib.util.spec_from_file_location("gradient_paths", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_noise(signal):
    """Half signal, half noise, around zero as the script has it."""
    signal = signal - signal.mean(0)
    return signal / signal.std() + torch.randn(signal.shape)


def test_a_linear_map_is_found_and_no_other(paths):
    torch.manual_seed(0)
    features = torch.randn(NUM_TOKENS, 24) + 3
    target = with_noise(features @ torch.randn(24, 32))
    assert paths.linear_share(features, target) == pytest.approx(0.5, abs=0.02)
    assert abs(paths.linear_share(torch.randn(NUM_TOKENS, 24), target)) < 0.01


@pytest.mark.parametrize("start", ["random", "clusters"])
def test_a_table_is_found_by_its_own_keys_and_by_no_others(paths, start, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(paths, "NUM_SUBKEYS", 8)
    monkeypatch.setattr(paths, "TABLE_RIDGES", (1.0,))
    queries = torch.randn(NUM_TOKENS, NUM_HEADS, WIDTH)
    keys = paths.make_keys(queries, start)
    with torch.no_grad():
        slots, weights = keys(queries)
    written = (weights.unsqueeze(-1) * torch.randn(64, WIDTH)[slots]).sum(-2).flatten(1)
    target = with_noise(written)
    assert paths.table_share(keys, queries, target) == pytest.approx(0.5, abs=0.03)
    others = torch.randn(NUM_TOKENS, NUM_HEADS, WIDTH)
    assert abs(paths.table_share(keys, others, target)) < 0.05

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


def read(paths, keys, queries, values):
    """What heads read of tables ``[H, N, O]``."""
    with torch.no_grad():
        slots, weights = keys(queries)
    heads = torch.arange(NUM_HEADS)[:, None]
    return (weights.unsqueeze(-1) * values[heads, slots]).sum(-2).flatten(1)


@pytest.fixture
def small_tables(paths, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(paths, "NUM_SUBKEYS", 8)
    monkeypatch.setattr(paths, "TABLE_RIDGES", (1.0,))


@pytest.mark.parametrize("start", ["random", "clusters"])
def test_a_table_is_found_by_its_own_keys_and_by_no_others(paths, start, small_tables):
    queries = torch.randn(NUM_TOKENS, NUM_HEADS, WIDTH)
    keys = paths.make_keys(queries, start)
    shared = torch.randn(64, WIDTH).expand(NUM_HEADS, -1, -1)
    target = with_noise(read(paths, keys, queries, shared))
    assert paths.table_share(keys, queries, target) == pytest.approx(0.5, abs=0.03)
    others = torch.randn(NUM_TOKENS, NUM_HEADS, WIDTH)
    assert abs(paths.table_share(keys, others, target)) < 0.05


def test_tables_of_heads_are_found_apart_and_not_as_one(paths, small_tables):
    queries = torch.randn(NUM_TOKENS, NUM_HEADS, WIDTH)
    keys = paths.make_keys(queries, "clusters")
    target = with_noise(read(paths, keys, queries, torch.randn(NUM_HEADS, 64, WIDTH)))
    assert paths.table_share(keys, queries, target, is_own=True) == pytest.approx(0.5, abs=0.03)
    assert paths.table_share(keys, queries, target) < 0.4


def test_a_table_beside_a_linear_map_explains_what_that_leaves(paths, small_tables):
    queries = torch.randn(NUM_TOKENS, NUM_HEADS, WIDTH)
    keys = paths.make_keys(queries, "clusters")
    features = torch.randn(NUM_TOKENS, 24)
    linear = features @ torch.randn(24, 32)
    table = read(paths, keys, queries, torch.randn(NUM_HEADS, 64, WIDTH))
    target = with_noise(linear / linear.std() + table / table.std())
    rest, said = paths.beyond_linear(features, target)
    assert paths.linear_share(features, target) == pytest.approx(0.25, abs=0.02)
    both = paths.table_share(keys, queries, target, True, rest, said)
    assert both == pytest.approx(0.5, abs=0.03)

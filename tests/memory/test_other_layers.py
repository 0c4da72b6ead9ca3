"""Linear, PKM and UltraMem against plain loops, and HML's other value families."""

import pytest
import torch
import torch.nn.functional as F

from midus.config import MemoryConfig
from midus.errors import MidusError
from midus.memory import MEMORY_LAYERS, ultramem

HIDDEN, HEADS = 24, 3
OTHERS = ["linear", "pkm", "ultramem"]


def make_layer(kind, hidden=HIDDEN, heads=HEADS, **options):
    torch.manual_seed(0)
    config = MemoryConfig(kind=kind, **{"num_subkeys": 6, "top_k": 3, **options})
    return MEMORY_LAYERS[kind](config, hidden, heads, hidden)


def filled(layer):
    torch.nn.init.normal_(layer.values.values)
    return layer


def queries_of(layer, attended):
    projected = attended @ layer.query_proj.weight.T
    return projected.view(*attended.shape[:-1], HEADS, -1)


@pytest.mark.parametrize("kind", ["linear", "pkm"])
def test_readings_of_all_heads_are_summed(kind):
    layer = filled(make_layer(kind))
    attended = torch.randn(2, 4, HIDDEN)
    queries = queries_of(layer, attended)
    expected = torch.zeros(2, 4, HIDDEN)
    for b in range(2):
        for t in range(4):
            for head in range(HEADS):
                query = queries[b, t, head]
                if kind == "linear":
                    scores = layer.keys.keys[head] @ query
                else:
                    row = layer.keys.row_keys[head] @ query[: len(query) // 2]
                    col = layer.keys.col_keys[head] @ query[len(query) // 2 :]
                    scores = (row[:, None] + col[None, :]).flatten()
                assert len(scores) == layer.num_slots == 36
                best, slots = scores.topk(3)
                expected[b, t] += best.softmax(0) @ layer.values.values[slots]
    torch.testing.assert_close(layer(attended), expected, rtol=1e-4, atol=1e-5)


def test_ultramem_is_its_rule_token_by_token():
    """Rank-1 Top-k on each side, exact Tucker scores on the pairs, groups, slices, projection."""
    layer = filled(make_layer("ultramem"))
    attended = torch.randn(2, 3, HIDDEN)
    queries = queries_of(layer, attended)
    rows, columns = (
        F.layer_norm(keys.transpose(2, 3), keys.shape[2:3]) * keys.shape[2] ** -0.33
        for keys in (layer.keys.row_keys, layer.keys.col_keys)
    )  # [H, 2n, r, E/2]
    cores, values = layer.keys.cores, layer.values
    num_rows, width = values.values.shape
    expected = torch.zeros(2, 3, HIDDEN)
    for b in range(2):
        for t in range(3):
            groups = torch.zeros(ultramem.EXPANSION, width)
            for head in range(HEADS):
                half = queries.shape[-1] // 2
                q_row, q_col = (
                    F.layer_norm(part, part.shape) * half**-0.33
                    for part in queries[b, t, head].split(half)
                )
                row, col = rows[head] @ q_row, columns[head] @ q_col  # [2n, r]
                u, _, vh = torch.linalg.svd(cores[:, head].sum(0))
                sign = 1 if u[:, 0].sum() > 0 else -1
                row_idx = (row @ (sign * u[:, 0])).topk(3).indices.tolist()
                col_idx = (col @ (sign * vh[0])).topk(3).indices.tolist()
                candidates = [
                    (torch.stack([row[i] @ core @ col[j] for core in cores[:, head]]), i * 12 + j)
                    for i in row_idx
                    for j in col_idx
                ]
                candidates.sort(key=lambda pair: -pair[0].sum().item())
                for scores, slot in candidates[:3]:
                    virtual = int(values.permutation[slot])
                    pieces = values.values[virtual % num_rows].split(width // ultramem.NUM_CORES)
                    weighted = [score * piece for score, piece in zip(scores, pieces, strict=True)]
                    groups[virtual // num_rows] += torch.cat(weighted)
            expected[b, t] = values.value_proj @ groups.flatten()
    torch.testing.assert_close(layer(attended), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", OTHERS)
def test_zero_at_the_start_then_everything_learns(kind):
    layer = make_layer(kind)
    inputs, target = torch.randn(2, 6, HIDDEN), torch.randn(2, 6, HIDDEN)
    assert not layer(inputs).any()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    every = {name for name, _ in layer.named_parameters()}
    for step in range(2):
        optimizer.zero_grad()
        (layer(inputs) - target).square().sum().backward()
        moved = {n for n, p in layer.named_parameters() if p.grad is not None and p.grad.any()}
        assert moved == ({"values.values"} if step == 0 else every)
        optimizer.step()


def test_ultramem_in_bfloat16_routes_as_float32_does():
    layer = make_layer("ultramem", hidden=256, heads=2, num_subkeys=32).to(torch.bfloat16)
    queries = torch.randn(200, 2, 128).to(torch.bfloat16)
    slots, _ = layer.keys(queries)
    wide, _ = layer.float().keys(queries.float())
    assert torch.equal(slots, wide)


def test_ultramem_slots_are_four_views_of_one_table():
    layer = make_layer("ultramem")
    assert layer.num_slots == 4 * 36
    assert layer.keys.row_keys.shape == (HEADS, 12, 4, 2)
    permutation = layer.values.permutation
    assert sorted(permutation.tolist()) == list(range(4 * 36))
    assert permutation.tolist() != list(range(4 * 36))
    assert torch.equal(permutation, make_layer("ultramem").values.permutation)


def test_ultramem_needs_widths_it_can_cut():
    with pytest.raises(MidusError, match="hidden_size=20 is not divisible by 8"):
        make_layer("ultramem", hidden=20, heads=2)


@pytest.mark.parametrize("kind", OTHERS)
def test_switches(kind):
    config = MemoryConfig(kind=kind)
    assert config.attention_residual
    assert config.attn_output_proj
    assert config.query_proj
    off = MemoryConfig(
        kind=kind, attention_residual=False, attn_output_proj=False, query_proj=False
    )
    assert not off.query_proj
    assert not any(
        n.startswith("query_proj") for n, _ in make_layer(kind, query_proj=False).named_parameters()
    )
    hml = MemoryConfig()
    assert {hml.attention_residual, hml.attn_output_proj, hml.query_proj} == {False}


@pytest.mark.parametrize("values", ["shared", "independent"])
def test_hml_value_families(values):
    layer = filled(make_layer("hml", values=values))
    attended = torch.randn(2, 4, HIDDEN)
    slots, weights = layer.keys(attended.view(2, 4, HEADS, 8))
    expected = torch.zeros(2, 4, HEADS, 8)
    for head in range(HEADS):
        bank = layer.values.values if values == "shared" else layer.values.values[head]
        expected[:, :, head] = (weights[:, :, head, :, None] * bank[slots[:, :, head]]).sum(2)
    torch.testing.assert_close(layer(attended), expected.flatten(-2))
    count = sum(p.numel() for p in layer.values.parameters())
    assert count == 36 * 8 * (1 if values == "shared" else HEADS)
    assert not make_layer("hml", values=values)(attended).any()


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "pkm", "values": "shared"},
        {"kind": "linear", "latent_dim": 4},
        {"kind": "pkm", "value_proj_init": "identity"},
        {"kind": "ultramem", "key_init": "normal"},
        {"values": "shared", "latent_dim": 5},
    ],
    ids=str,
)
def test_options_a_layer_would_ignore_are_refused(options):
    with pytest.raises(MidusError, match="is an option of"):
        MemoryConfig(**options)


def test_unknown_values_are_refused():
    with pytest.raises(MidusError, match="choose one of hive, shared, independent"):
        MemoryConfig(values="none")

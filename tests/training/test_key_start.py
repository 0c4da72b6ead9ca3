"""Keys that start as clusters of the queries."""

import pytest
import torch
from tiny import grown, prompt_ids

from midus import MemoryConfig
from midus.errors import MidusError
from midus.models.slots import memory_layers
from midus.training.key_start import cluster_directions, first_batches, start_keys_from_queries


def test_clusters_are_found_whatever_is_common_to_all_points():
    generator = torch.Generator().manual_seed(0)
    axes = torch.eye(5)[:4]  # the fifth direction is what all points share
    points = axes.repeat(50, 1) + 0.02 * torch.randn(200, 5, generator=generator)
    points[:, 4] = 30.0
    found = cluster_directions(points.unsqueeze(0), 4, torch.Generator().manual_seed(2))[0]
    # By hand: the axes without their mean, at unit length, in whatever order.
    wanted = torch.nn.functional.normalize(axes - axes.mean(0), dim=-1)
    likeness = found @ wanted.T
    assert likeness.max(0).values.min() > 0.99
    assert found[:, 4].abs().max() < 0.02
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(4))


def test_keys_change_their_directions_and_keep_their_length_and_the_function():
    model = grown(filled=False).eval()
    layers = memory_layers(model)
    lengths = {i: layer.keys.row_keys.norm(dim=-1).mean() for i, layer in layers.items()}
    before = {i: layer.keys.row_keys.clone() for i, layer in layers.items()}
    ids = prompt_ids(4, 32)
    logits = model(ids).logits
    start_keys_from_queries(model, [ids[:2], ids[2:]], seed=1)
    for index, layer in layers.items():
        keys = layer.keys.row_keys
        assert not torch.equal(keys, before[index])
        torch.testing.assert_close(
            keys.norm(dim=-1), lengths[index].expand(keys.shape[:2]), rtol=1e-4, atol=0
        )
    assert torch.equal(model(ids).logits, logits)  # the tables are zero still


def test_slots_are_used_more_evenly_than_with_random_keys():
    from midus.models.slots import counting_slots

    def used(start):
        model = grown(filled=False, memory=MemoryConfig(num_subkeys=8, top_k=1)).eval()
        ids = prompt_ids(8, 64)
        if start:
            start_keys_from_queries(model, [ids], seed=0)
        with counting_slots(model, 10_000) as counters:
            model(ids)
        return [counter.usage().entropy for counter in counters.values()]

    assert all(after > before for before, after in zip(used(False), used(True), strict=True))


def test_keys_that_learned_values_hang_on_are_not_replaced():
    model = grown(filled=False)
    ids = prompt_ids(4, 32)
    layer = next(iter(memory_layers(model).values()))
    with torch.no_grad():
        next(layer.value_tables())[3, 0] = 1e-3
    before = layer.keys.row_keys.clone()
    with pytest.raises(MidusError, match="has learned values that its keys lead to; use key_start"):
        start_keys_from_queries(model, [ids])
    assert torch.equal(layer.keys.row_keys, before)


def test_layers_without_product_keys_and_too_few_tokens_are_refused():
    with pytest.raises(MidusError, match="needs memory layers with product keys"):
        start_keys_from_queries(grown(memory=MemoryConfig(kind="linear", num_subkeys=8)), [])
    with pytest.raises(MidusError, match="3 tokens cannot start num_subkeys=8"):
        start_keys_from_queries(grown(filled=False), [prompt_ids(1, 3)])


def test_the_first_tokens_are_taken_in_batches():
    rows = [{"input_ids": torch.full((8192,), i)} for i in range(5)]
    batches = list(first_batches(rows, 1))
    assert [batch[0, 0].item() for batch in batches] == [0, 1]

"""Slot usage, counted by hand."""

import math

import pytest
import torch
from tiny import grown, prompt_ids, tiny_base

from midus import MemoryConfig
from midus.memory import MEMORY_LAYERS
from midus.models.slots import counting_slots


@torch.no_grad()
def slot_usage(model, batches, max_tokens=1_000):
    with counting_slots(model, max_tokens) as counters:
        for ids in batches:
            model(ids)
    return {index: counter.usage() for index, counter in counters.items()}


def test_usage_is_that_of_the_slots_the_layers_choose():
    model = grown()
    ids = prompt_ids(batch=2)
    usage = slot_usage(model, [ids[:1], ids[1:]])
    assert list(usage) == list(model.config.memory_positions)
    seen = {}

    def look(layer, args):
        seen["slots"] = layer.keys(layer.make_queries(args[0]))[0]

    index = model.config.memory_positions[0]
    layer = model.model.layers[index].memory
    layer.register_forward_pre_hook(look)
    with torch.no_grad():
        model(ids)
    slots = seen["slots"]  # [B, T, H, K]
    used, entropies = 0, []
    for head in range(layer.num_heads):
        _, counts = slots[:, :, head].flatten().unique(return_counts=True)
        shares = counts.double() / counts.sum()
        used += len(counts)
        entropies.append(-(shares * shares.log()).sum().item())
    assert usage[index].used == pytest.approx(used / (layer.num_heads * layer.num_slots))
    expected = sum(entropies) / len(entropies) / math.log(layer.num_slots)
    assert usage[index].entropy == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_every_memory_layer_is_counted(kind):
    model = grown(memory=MemoryConfig(kind=kind, num_subkeys=8))
    usage = slot_usage(model, [prompt_ids(batch=2)])
    assert all(0 < block.used <= 1 and 0 < block.entropy <= 1 for block in usage.values())
    assert len(usage) == 2


def test_a_model_without_memory_has_none():
    assert slot_usage(tiny_base(), [prompt_ids()]) == {}


def test_counting_stops_at_the_limit_and_leaves_no_hook():
    model = grown()
    once = slot_usage(model, [prompt_ids()])
    assert slot_usage(model, [prompt_ids(), prompt_ids(seed=9)], max_tokens=12) == once
    assert not any(module._forward_pre_hooks for module in model.modules())

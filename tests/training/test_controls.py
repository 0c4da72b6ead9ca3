"""Controls train as many parameters as the model they stand against, as near as they can."""

import pytest
import torch
from tiny import prompt_ids, tiny_base

from midus.training.controls import apply_control, lora_rank
from midus.training.freezing import count_trainable


def layer_size(model):
    return sum(p.numel() for p in model.model.layers[0].parameters())


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_last_layers_come_nearest_to_the_count(layers):
    base = tiny_base()
    target = layers * layer_size(base) + layer_size(base) // 3
    model = apply_control(base, "last_layers", target)
    assert count_trainable(model) == layers * layer_size(base)
    assert all(p.requires_grad for p in model.model.layers[-layers:].parameters())
    assert not model.lm_head.weight.requires_grad


def test_one_layer_at_least():
    assert count_trainable(apply_control(tiny_base(), "last_layers", 1)) == layer_size(tiny_base())


def test_lora_has_the_rank_nearest_to_the_count():
    base = tiny_base()
    size = sum(sum(m.weight.shape) for m in base.model.layers.modules()
               if isinstance(m, torch.nn.Linear))  # fmt: skip
    model = apply_control(base, "lora", 3 * size + size // 3)
    assert lora_rank(tiny_base(), 3 * size + size // 3) == 3
    assert count_trainable(model) == 3 * size
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


def test_lora_starts_as_the_base():
    base = tiny_base()
    expected = base(prompt_ids()).logits
    model = apply_control(base, "lora", 5_000)
    assert torch.equal(model(input_ids=prompt_ids()).logits, expected)

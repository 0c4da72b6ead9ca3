"""Exactly the intended tensors train, and frozen blocks below them keep nothing."""

import pytest
import torch
from tiny import MEMORY, grown, prompt_ids, tiny_base

from midus import MidusError, UpscaleConfig, upscale
from midus.models.checkpoint import is_inserted
from midus.training.freezing import choose_trainable, count_trainable


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("method", ["midus", "llama_pro", "avg_deus"])
def test_pre_training_trains_the_inserted_blocks(method):
    model = upscale(tiny_base(), UpscaleConfig(method=method, memory=MEMORY if method == "midus"
                                               else UpscaleConfig().memory))  # fmt: skip
    assert choose_trainable(model, "cpt") == "inserted"
    names = {name for name, _ in model.named_parameters()}
    assert trained(model) == {name for name in names if is_inserted(name, model.config)} != set()


@pytest.mark.parametrize("method", ["base", "solar", "stack"])
def test_methods_that_change_the_base_train_everything(method):
    model = upscale(tiny_base(), UpscaleConfig(method=method))
    assert choose_trainable(model, "cpt") == "all"
    assert trained(model) == {name for name, _ in model.named_parameters()}


def test_fine_tuning_trains_everything_unless_told_otherwise():
    model = grown()
    assert choose_trainable(model, "sft") == "all"
    assert count_trainable(model) == sum(p.numel() for p in model.parameters())
    assert choose_trainable(model, "sft", "inserted") == "inserted"
    assert all(is_inserted(name, model.config) for name in trained(model))


def test_inserted_of_a_model_without_any_is_refused():
    with pytest.raises(MidusError, match="no inserted blocks"):
        choose_trainable(tiny_base(), "cpt", "inserted")


def test_frozen_blocks_below_the_first_inserted_one_keep_no_activations():
    model = upscale(tiny_base(), UpscaleConfig(placement="top_heavy", memory=MEMORY))
    first = model.config.memory_positions[0]
    assert first >= 2
    kept = []
    handles = [model.model.layers[first].register_forward_pre_hook(lambda *_: kept.append("first"))]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        model(input_ids=prompt_ids(), labels=prompt_ids())
    handles[0].remove()
    assert kept.index("first") == 0  # nothing was saved before it ran
    assert len(kept) > 1


def test_only_trainable_tensors_get_gradients():
    model = grown()
    choose_trainable(model, "cpt")
    model(input_ids=prompt_ids(), labels=prompt_ids()).loss.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == trained(model)

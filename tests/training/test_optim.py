import math

import pytest
import torch
from tiny import grown, prompt_ids

from midus import MemoryConfig
from midus.memory import MEMORY_LAYERS
from midus.training import constant_memory_schedule, parameter_groups

KEYS_AND_VALUES = {
    "hml": {"row_keys", "col_keys", "latent_values"},
    "linear": {"keys", "values"},
    "pkm": {"row_keys", "col_keys", "values"},
    "ultramem": {"row_keys", "col_keys", "values"},
}


def named_groups(model, **options):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        group["name"]: ({names[id(p)] for p in group["params"]}, group)
        for group in parameter_groups(model, **options)
    }


@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_keys_and_values_have_a_group_of_their_own(kind):
    model = grown(memory=MemoryConfig(kind=kind, num_subkeys=8))
    groups = named_groups(model, lr=1e-4, memory_lr=1e-2, weight_decay=0.1)
    names, memory = groups["memory"]
    assert {name.rpartition(".")[2] for name in names} == KEYS_AND_VALUES[kind]
    assert len(names) == len(KEYS_AND_VALUES[kind]) * 2  # two inserted blocks
    assert (memory["lr"], memory["weight_decay"]) == (1e-2, 0.0)
    assert all(p.ndim > 1 for p in groups["decay"][1]["params"])
    assert groups["decay"][1]["weight_decay"] == 0.1
    assert groups["no_decay"][1]["weight_decay"] == 0.0
    assert groups["decay"][1]["lr"] == groups["no_decay"][1]["lr"] == 1e-4


def test_projections_of_values_follow_the_schedule():
    groups = named_groups(grown(), lr=1e-4)
    assert any(name.endswith("value_proj") for name in groups["decay"][0])
    assert groups["memory"][1]["lr"] == 1e-4  # the paper's rate


def test_every_trainable_parameter_is_in_one_group_and_no_other():
    model = grown()
    grouped = [p for group in parameter_groups(model, lr=1e-4) for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped})
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p.requires_grad}


def test_memory_keeps_its_rate_over_a_whole_cosine():
    model = grown()
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3, memory_lr=3e-2))
    schedule = constant_memory_schedule(optimizer, num_steps=40)
    rates = []
    for _ in range(41):
        rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
        optimizer.step()
        schedule.step()
    assert {rate["memory"] for rate in rates} == {3e-2}
    cosine = [rate["decay"] for rate in rates]
    assert cosine[:5] == pytest.approx([0, 2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert cosine[22] == pytest.approx(0.5e-3)
    assert cosine[31] == pytest.approx(0.5e-3 * (1 + math.cos(math.pi * 0.75)))
    assert cosine[40] == pytest.approx(0, abs=1e-12)


def test_only_trained_tensors_get_gradients_and_optimizer_state_and_the_loss_falls():
    model = grown(filled=False).train()
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2, memory_lr=1e-1))
    schedule = constant_memory_schedule(optimizer, num_steps=20)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = prompt_ids(2, 16)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
        assert (parameter in optimizer.state) == parameter.requires_grad

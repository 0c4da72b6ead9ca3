"""Parts of the memory blocks with rates, schedules, decay and clipping of their own."""

import pytest
import torch
from tiny import grown, prompt_ids, tiny_base

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.errors import MidusError
from midus.training.optim import constant_memory_schedule, make_clipping, parameter_groups
from midus.training.optimizer_options import OptimizerOptions, PartOptions
from midus.training.options import TrainOptions

LEAVES = {
    "attention": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    "keys": {"memory.keys.row_keys", "memory.keys.col_keys"},
    "values": {"memory.values.latent_values"},
    "value_proj": {"memory.values.value_proj"},
    "output_proj": {"memory_output_proj"},
    "bypass": {"bypass"},
}


def make_model():
    return grown(memory=MemoryConfig(num_subkeys=8, memory_output_proj=True, bypass="stream"))


def groups_of(model, **parts):
    groups = parameter_groups(model, 1e-3, 1e-2, 0.1, parts=parts)
    return {group["name"]: group for group in groups}


@pytest.mark.parametrize("part", LEAVES)
def test_a_part_is_its_own_matrices_of_every_memory_block(part):
    model = make_model()
    names = {id(p): name for name, p in model.named_parameters()}
    group = groups_of(model, **{part: PartOptions(lr=0.5)})[part]
    found = [names[id(p)].removesuffix(".weight") for p in group["params"]]
    assert {name.split(".", 3)[3] for name in found} == LEAVES[part]
    assert len(found) == 2 * len(LEAVES[part])  # two memory blocks
    assert group["lr"] == 0.5


@pytest.mark.parametrize("method", ["midus", "llama_pro"])
def test_norms_are_gains_and_biases_of_all_that_trains(method):
    model = upscale(tiny_base(attention_bias=True), UpscaleConfig(method=method))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = groups_of(model, norms=PartOptions(lr=0.5))
    assert "no_decay" not in groups
    assert (groups["norms"]["lr"], groups["norms"]["weight_decay"]) == (0.5, 0.0)
    found = {names[id(p)] for p in groups["norms"]["params"]}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert found == {name for name, p in trained.items() if p.ndim == 1}
    assert {name.rpartition(".")[2] for name in found} == {"weight", "bias"}
    limit = PartOptions(max_grad_norm=1e-4)
    model.train()(prompt_ids(2, 16), labels=prompt_ids(2, 16)).loss.backward()
    make_clipping(model, 1e6, {"norms": limit})()
    clipped = torch.cat([trained[name].grad.flatten() for name in found])
    assert clipped.norm() <= 1.001e-4
    rest = [p.grad.flatten() for name, p in trained.items() if name not in found]
    assert torch.cat(rest).norm() > 1e-3


def test_rates_of_norms_are_given_as_they_are():
    for own in (PartOptions(relative_lr=0.1), PartOptions(by_stream=True)):
        with pytest.raises(MidusError, match=r"optimizer\.parts\.norms takes lr"):
            OptimizerOptions(parts={"norms": own})


def test_what_a_part_does_not_say_is_as_before():
    model = make_model()
    groups = groups_of(model, keys=PartOptions(), attention=PartOptions(weight_decay=0.3))
    assert (groups["keys"]["lr"], groups["keys"]["weight_decay"]) == (1e-2, 0.0)
    assert (groups["attention"]["lr"], groups["attention"]["weight_decay"]) == (1e-3, 0.3)
    assert (groups["memory"]["lr"], groups["decay"]["weight_decay"]) == (1e-2, 0.1)
    assert len(groups["memory"]["params"]) == 2  # the tables alone


def rates_of(optimizer, schedule, num_steps):
    """The rates of each group before each step."""
    rates = {group["name"]: [] for group in optimizer.param_groups}
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            rates[group["name"]].append(group["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_a_part_follows_its_own_schedule():
    model = make_model()
    parts = {"values": PartOptions(schedule="linear", warmup_ratio=0.2), "keys": PartOptions()}
    optimizer = torch.optim.AdamW(parameter_groups(model, 1.0, 2.0, parts=parts))
    schedule = constant_memory_schedule(optimizer, 10, 0.0, "constant", parts=parts)
    rates = rates_of(optimizer, schedule, 11)
    assert rates["values"] == pytest.approx([0, 1, *(2 * (1 - i / 8) for i in range(9))])
    assert set(rates["keys"]) == {2.0}
    assert set(rates["decay"]) == {1.0}


def test_a_schedule_can_fall_late():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = constant_memory_schedule(optimizer, 10, 0.2, "linear", decay_ratio=0.5)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    expected = [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates == pytest.approx(expected)


def test_a_part_can_fall_later_than_the_rest():
    model = make_model()
    parts = {"values": PartOptions(schedule="linear", decay_ratio=0.25), "keys": PartOptions()}
    optimizer = torch.optim.AdamW(parameter_groups(model, 1.0, 1.0, parts=parts))
    schedule = constant_memory_schedule(optimizer, 8, 0.0, "linear", parts=parts)
    rates = rates_of(optimizer, schedule, 9)
    assert rates["values"] == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.5, 0])
    assert rates["decay"] == pytest.approx([1 - i / 8 for i in range(9)])
    assert set(rates["keys"]) == {1.0}


def test_a_part_is_clipped_alone():
    model = make_model().train()
    model(prompt_ids(2, 16), labels=prompt_ids(2, 16)).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {name: p.grad.clone() for name, p in trained.items()}
    tables = [name for name in trained if name.endswith("latent_values")]
    rest = [name for name in trained if name not in tables]

    def norm(grads, names):
        return torch.cat([grads[name].flatten() for name in names]).norm()

    limits = (norm(before, tables) / 4, norm(before, rest) / 2)
    parts = {"values": PartOptions(max_grad_norm=float(limits[0]))}
    whole = make_clipping(model, float(limits[1]), parts)()
    after = {name: p.grad for name, p in trained.items()}
    torch.testing.assert_close(whole, norm(before, trained))
    torch.testing.assert_close(norm(after, tables), limits[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(norm(after, rest), limits[1], rtol=1e-4, atol=0)


def test_options_name_parts_and_refuse_others():
    data = {"sources": ["x"]}
    values = {"stage": "cpt", "model": "m", "output": "o", "data": data}
    parts = {"values": {"lr": "3e-2", "max_grad_norm": 0.1}}
    options = TrainOptions.from_dict({**values, "optimizer": {"parts": parts}})
    assert options.optimizer.parts["values"] == PartOptions(lr=0.03, max_grad_norm=0.1)
    assert options.to_dict()["optimizer"]["parts"]["values"]["lr"] == 0.03
    for wrong, message in (
        ({"tables": {}}, "part of optimizer.parts='tables'"),
        ({"keys": {"rate": 1}}, r"unknown option optimizer.parts.keys.rate"),
        ({"keys": {"schedule": "step"}}, "schedule of a part='step'"),
        (3, "optimizer.parts=3"),
    ):
        with pytest.raises(MidusError, match=message):
            TrainOptions.from_dict({**values, "optimizer": {"parts": wrong}})
    with pytest.raises(MidusError, match="exclude each other"):
        OptimizerOptions(constant_value_proj=True, parts={"value_proj": PartOptions()})
    with pytest.raises(MidusError, match=r"no effect with trainer\.max_grad_norm=0"):
        TrainOptions.from_dict(
            {**values, "optimizer": {"parts": parts}, "trainer": {"max_grad_norm": 0}}
        )

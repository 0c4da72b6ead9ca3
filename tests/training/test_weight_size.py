"""Rates relative to the size of a base's weights."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from runs import make_options
from tiny import grown, prompt_ids, save_base, tiny_base

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.errors import MidusError
from midus.studies.trials import trial_key
from midus.training.arguments import count_steps, make_arguments
from midus.training.controls import apply_control
from midus.training.dry_run import describe_run
from midus.training.optim import parameter_groups
from midus.training.optimizer_options import OptimizerOptions
from midus.training.options import TrainOptions
from midus.training.run import make_trainer
from midus.training.starting import start_model
from midus.training.weight_size import weight_size

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rescaled(base, by):
    """A base that computes the same: matrices and stream times ``by``, what norms give divided."""
    base = copy.deepcopy(base)
    with torch.no_grad():
        base.model.embed_tokens.weight.mul_(by)
        for block in base.model.layers:
            for name, module in block.named_modules():
                if name.endswith(MATRICES):
                    module.weight.mul_(by)
                elif name.endswith("layernorm"):
                    module.weight.div_(by)
    return base


def losses(base, optimizer, steps=12):
    """Losses of a grown base, norms as they are: their gains are no matrices."""
    memory = MemoryConfig(
        num_subkeys=8, values="independent", bypass="attention", query_norm="layer"
    )
    model = upscale(copy.deepcopy(base), UpscaleConfig(memory=memory)).train()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter.ndim > 1)
    optimizer = optimizer.absolute(weight_size(model))
    groups = parameter_groups(model, optimizer.lr, optimizer.memory_lr, parts=optimizer.parts)
    adam = torch.optim.AdamW(groups, eps=1e-16)
    ids, found = prompt_ids(4, 24), []
    for _ in range(steps):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        adam.step()
        adam.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def optimizer_of(**values):
    parts = {"keys": {"lr": 1e-3}}
    options = make_values(optimizer={**values, "parts": parts})
    return options.optimizer.resolved("cpt")


def make_values(**values):
    fixed = {"stage": "cpt", "model": "m", "output": "o", "data": {"sources": "t"}}
    return TrainOptions.from_dict(fixed | values)


def test_bases_that_compute_the_same_train_alike_at_a_relative_rate_only():
    base = tiny_base(rms_norm_eps=1e-16).double()
    other = rescaled(base, 8.0)  # a power of two, which rounds nothing
    ids = prompt_ids()
    assert torch.equal(base(ids).logits, other(ids).logits)
    relative, plain = optimizer_of(relative_lr=0.05), optimizer_of(lr=0.015)
    apart = (losses(base, relative) - losses(other, relative)).abs().max()
    assert apart < 1e-6
    assert losses(base, relative)[-1] < losses(base, relative)[0] - 0.5
    assert (losses(base, plain) - losses(other, plain)).abs().max() > 0.1


def test_it_is_the_median_over_the_matrices_of_the_bases_own_blocks():
    base = tiny_base()
    for index, block in enumerate(base.model.layers):
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data.fill_(0.1 * (index + 1) * (-1) ** index)
    assert weight_size(base) == pytest.approx(0.25)  # of 0.1, 0.2, 0.3 and 0.4
    memory = upscale(copy.deepcopy(base), UpscaleConfig())
    copied = upscale(copy.deepcopy(base), UpscaleConfig(method="llama_pro"))
    for model in (memory, copied):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data.fill_(5.0)
                assert "layers" in name
        assert weight_size(model) == pytest.approx(0.25)


def test_adapters_do_not_count():
    base = tiny_base()
    size = weight_size(base)
    assert weight_size(apply_control(base, "lora", 5_000)) == size


def test_a_base_in_4_bits_is_as_large(tmp_path):
    # Widths that bitsandbytes' blocks of 64 divide.
    save_base(tmp_path / "base", hidden_size=128, intermediate_size=256, head_dim=32)
    plain, packed = (
        start_model(make_options(tmp_path, load_in_4bit=bits)).model for bits in (False, True)
    )
    assert packed.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert weight_size(packed) == pytest.approx(weight_size(plain), rel=0.02)


def test_a_model_without_linear_layers_is_refused():
    base = tiny_base()
    base.model.layers = torch.nn.ModuleList()
    with pytest.raises(MidusError, match="give lr instead"):
        weight_size(base)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"lr": 1e-3, "relative_lr": 0.03}, "optimizer.lr=0.001 and relative_lr=0.03 exclude"),
        ({"relative_lr": -1}, "optimizer.relative_lr=-1 must be a number"),
        ({"parts": {"keys": {"lr": 1e-3, "relative_lr": 0.03}}}, "a part's lr=0.001 and"),
    ],
)
def test_rates_that_make_no_sense_are_refused(optimizer, message):
    with pytest.raises(MidusError, match=message):
        make_values(optimizer=optimizer)


def test_multiples_become_rates():
    values = {"relative_lr": 0.03, "parts": {"values": {"relative_lr": 0.2}, "keys": {"lr": 1e-2}}}
    options = make_values(optimizer=values).optimizer
    assert options.is_relative
    paper = options.resolved("cpt")
    assert paper.lr is None
    rates = paper.absolute(0.1)
    assert not rates.is_relative
    assert rates.lr == rates.memory_lr == pytest.approx(3e-3)
    assert rates.parts["values"].lr == pytest.approx(2e-2)
    assert rates.parts["keys"].lr == 1e-2
    short = replace(options, recipe="short").resolved("cpt").absolute(0.1)
    assert short.memory_lr == 1e-2  # which is no multiple
    assert not OptimizerOptions().resolved("cpt").is_relative


def test_a_run_measures_its_base_and_says_so(tmp_path):
    options = make_options(tmp_path, optimizer={"recipe": "short", "relative_lr": 0.03})
    options = replace(options, optimizer=options.optimizer.resolved("cpt"))
    said = []
    trainer, start = make_trainer(options, say=said.append)
    size = weight_size(start.model)
    groups = {group["name"]: group["lr"] for group in trainer.create_optimizer().param_groups}
    assert groups == {
        "decay": pytest.approx(0.03 * size),
        "no_decay": pytest.approx(0.03 * size),
        "memory": 1e-2,
    }
    assert [line for line in said if f"size {size:.4f}, which makes lr {0.03 * size:.2e}" in line]
    plan = {group["name"]: group for group in describe_run(options)["groups"]}
    assert (plan["decay"]["lr"], plan["decay"]["is_relative"]) == (0.03, True)
    assert (plan["memory"]["lr"], plan["memory"]["is_relative"]) == (1e-2, False)


def test_keys_of_trials_that_have_no_such_rate_are_as_before():
    options = make_values(optimizer={"lr": 1e-3, "parts": {"keys": {"lr": 1e-2}}})
    assert "relative_lr" in json.dumps(options.to_dict())
    # The key that code before the option gave it.
    assert trial_key(options, "x") == "58465aa553b62df4"
    other = make_values(optimizer={"relative_lr": 1e-3, "parts": {"keys": {"lr": 1e-2}}})
    assert trial_key(other, "x") != trial_key(options, "x")


def test_grown_blocks_of_tiny_models_do_not_count():
    assert weight_size(grown()) == weight_size(tiny_base())


def test_a_rate_for_some_steps_goes_with_those_of_the_run():
    own = {"relative_lr": 0.02, "for_steps": 400, "steps_power": 1.0}
    values = {"relative_lr": 0.03, "for_steps": 400, "parts": {"values": own, "keys": {"lr": 1e-2}}}
    options = make_values(optimizer=values).optimizer.resolved("cpt")
    assert options.goes_with_steps
    for steps, by, of_values in ((400, 1.0, 1.0), (50, 2.0, 8.0), (3200, 0.5, 0.125), (None, 1, 1)):
        rates = options.absolute(0.1, steps)
        assert rates.lr == pytest.approx(3e-3 * by)
        assert rates.parts["values"].lr == pytest.approx(2e-3 * of_values)
        assert rates.parts["keys"].lr == 1e-2
        assert not rates.goes_with_steps
    plain = make_values(optimizer={"relative_lr": 0.03}).optimizer.resolved("cpt")
    assert plain.absolute(0.1, 50) == plain.absolute(0.1, 3200)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"for_steps": 400}, "optimizer.for_steps=400 is what a relative_lr is for"),
        ({"lr": 1e-3, "for_steps": 400}, "give relative_lr, or leave it out"),
        ({"relative_lr": 0.1, "for_steps": 0}, "for_steps=0 must be a whole number"),
        ({"relative_lr": 0.1, "for_steps": 1.5}, "for_steps=1.5 must be a whole number"),
        ({"relative_lr": 0.1, "steps_power": 1}, "optimizer.steps_power=1 says how a rate falls"),
        ({"relative_lr": 0.1, "for_steps": 9, "steps_power": 2}, "steps_power=2 must be a number"),
        ({"parts": {"values": {"for_steps": 400}}}, "a part's for_steps=400"),
    ],
)
def test_steps_of_no_rate_are_refused(optimizer, message):
    with pytest.raises(MidusError, match=message):
        make_values(optimizer=optimizer)


def test_a_run_counts_its_steps_and_says_the_rates(tmp_path):
    own = {"values": {"relative_lr": 0.3, "for_steps": 80, "steps_power": 1.0}}
    rates = {"recipe": "short", "relative_lr": 0.03, "for_steps": 80, "parts": own}
    options = make_options(tmp_path, optimizer=rates)
    options = replace(options, optimizer=options.optimizer.resolved("cpt"))
    said = []
    trainer, start = make_trainer(options, say=said.append)
    steps, size = trainer.args.max_steps, weight_size(start.model)
    assert steps > 0
    groups = {group["name"]: group["lr"] for group in trainer.create_optimizer().param_groups}
    assert groups["decay"] == pytest.approx(0.03 * size * (80 / steps) ** (1 / 3))
    assert groups["values"] == pytest.approx(0.3 * size * 80 / steps)
    assert [line for line in said if f"values {groups['values']:.2e} for {steps} steps" in line]
    plan = {group["name"]: group["lr"] for group in describe_run(options)["groups"]}
    assert plan["values"] == pytest.approx(0.3 * 80 / steps)


def test_epochs_are_counted_where_no_steps_are_given(tmp_path):
    options = make_options(tmp_path, trainer={"num_train_epochs": 1.5, "max_steps": -1})
    arguments = make_arguments(options, has_held_out=False)
    assert count_steps(arguments, 100, 8) == 20  # 12 a pass, and one of the 4 that are left
    assert count_steps(arguments, 7, 8) == 2  # one a pass, and half of another


def test_steps_are_counted_as_the_trainer_takes_them(tmp_path):
    accumulated = {"num_train_epochs": 3, "max_steps": -1, "per_device_train_batch_size": 2}
    options = make_options(tmp_path, batch_size=16, trainer=accumulated)
    trainer, _ = make_trainer(options)
    counted = count_steps(trainer.args, len(trainer.train_dataset), 16)
    assert len(trainer.train_dataset) % 16 >= 2, "a pass must leave something over"
    trainer.train()
    assert trainer.state.global_step == counted

"""Muon beside AdamW: which parameters it steps, its steps, and runs with it."""

import copy
import math

import pytest
import torch
from runs import assert_resumes_alike, make_options
from tiny import grown, prompt_ids, tiny_base

from midus import MemoryConfig
from midus.errors import MidusError
from midus.memory import MEMORY_LAYERS
from midus.memory.base import MemoryLayer
from midus.training import orthogonal
from midus.training.muon import MuonBeside, split_for_muon
from midus.training.optim import constant_memory_schedule, groups_of, make_optimizer
from midus.training.optimizer_options import OptimizerOptions, PartOptions
from midus.training.orthogonal import orthogonalize
from midus.training.run import make_trainer, train

BYPASS = MemoryConfig(num_subkeys=8, bypass="both", memory_output_proj=True)
ADAMW = (torch.optim.AdamW, {"lr": 1.0, "betas": (0.9, 0.95)})


def options(**own):
    own = {"lr": 1e-2, "memory_lr": 3e-2, "weight_decay": 0.1, "matrices": "muon", **own}
    return OptimizerOptions(**own)


def names_of(model, groups):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        (group["name"], group.get("muon", False)): {names[id(p)] for p in group["params"]}
        for group in groups
    }


def test_linear_layers_go_to_muon_and_all_else_stays():
    model = grown(memory=BYPASS)
    groups = groups_of(model, options(parts={"bypass": PartOptions(lr=0.5)}))
    by_name = names_of(model, groups)
    assert set(by_name) == {
        *(("matrices", True), ("bypass", True)),
        *(("decay", False), ("no_decay", False), ("memory", False)),
    }
    leaves = {name.partition("layers.")[2].partition(".")[2] for name in by_name["matrices", True]}
    assert leaves == {
        *(f"self_attn.{kind}_proj.weight" for kind in "qkv"),
        "memory_output_proj.weight",
    }
    assert all(name.endswith("value_proj") for name in by_name["decay", False])
    rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
    assert rates["bypass"] == (0.5, 0.1)
    assert rates["matrices"] == rates["decay"] == (1e-2, 0.1)
    assert rates["memory"] == (3e-2, 0.0)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("own", [{}, {"keys": PartOptions(lr=0.5), "values": PartOptions(lr=0.5)}])
@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_tables_are_no_matrices(kind, own):
    model = grown(memory=MemoryConfig(kind=kind, num_subkeys=8))
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, MemoryLayer)
        for parameter in module.keys_and_values()
    }
    by_muon = [g for g in groups_of(model, options(parts=own)) if g.get("muon")]
    assert by_muon
    assert not tables & {id(p) for group in by_muon for p in group["params"]}


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_whole_model_embeddings_and_head_stay(tied):
    model = tiny_base(tie_word_embeddings=tied).requires_grad_(True)
    by_name = names_of(model, groups_of(model, options()))
    assert "model.embed_tokens.weight" in by_name["decay", False]
    assert ("lm_head.weight" in by_name["decay", False]) != tied
    assert all(".layers." in name for name in by_name["matrices", True])


def step(model, *optimizers):
    model(prompt_ids(), labels=prompt_ids()).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_steps_are_those_of_both_optimizers_apart():
    together = grown(memory=BYPASS).train()
    apart = copy.deepcopy(together)
    fresh = {name: p.detach().clone() for name, p in apart.named_parameters()}
    both = make_optimizer(together, options(), ADAMW)
    groups = groups_of(apart, options())
    muon = MuonBeside([group for group in groups if group.get("muon")], torch.optim.AdamW)
    adamw = torch.optim.AdamW([g for g in groups if not g.get("muon")], betas=(0.9, 0.95))
    schedules = [constant_memory_schedule(optimizer, 4) for optimizer in (both, muon, adamw)]
    for _ in range(4):
        step(together, both)
        step(apart, muon, adamw)
        for schedule in schedules:
            schedule.step()
    for name, parameter in together.named_parameters():
        assert torch.equal(parameter, apart.get_parameter(name)), name
        assert torch.equal(parameter, fresh[name]) != parameter.requires_grad, name


def assert_steps_alike(ours, theirs, before):
    """Products in bfloat16, in batches and one by one, need not agree in their last bits."""
    assert (ours - theirs).norm() <= 0.01 * (theirs - before).norm()


def by_muon(groups):
    """Our own, for nothing but matrices."""
    return MuonBeside([{**group, "muon": True} for group in groups], torch.optim.AdamW)


def matrices_and_gradients(shapes, steps=3):
    """Matrices, and gradients for each of some steps; the second has none in the first step."""
    chance = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=chance) for shape in shapes]
    grads = [[torch.randn(shape, generator=chance) for shape in shapes] for _ in range(steps)]
    grads[0][1] = None
    return matrices, grads


def stepped(make, shapes):
    """Matrices after three steps of an optimizer of two groups, and as they were."""
    before, grads = matrices_and_gradients(shapes)
    matrices = [torch.nn.Parameter(matrix.clone()) for matrix in before]
    optimizer = make(
        [
            {"params": matrices[::2], "lr": 1e-2, "weight_decay": 0.1},
            {"params": matrices[1::2], "lr": 3e-2, "weight_decay": 0.0},
        ]
    )
    for of_step in grads:
        for matrix, grad in zip(matrices, of_step, strict=True):
            matrix.grad = grad
        optimizer.step()
    return [matrix.detach() for matrix in matrices], before


SHAPES = [(24, 40), (24, 40), (40, 24), (16, 16), (24, 40), (40, 24)]


def test_matrices_of_one_shape_step_together_as_torch_steps_them_one_by_one():
    ours, before = stepped(by_muon, SHAPES)
    theirs, _ = stepped(lambda g: torch.optim.Muon(g, adjust_lr_fn="match_rms_adamw"), SHAPES)
    for matrix, expected, start in zip(ours, theirs, before, strict=True):
        assert_steps_alike(matrix, expected, start)


def test_stacks_that_are_too_large_are_cut(monkeypatch):
    whole, before = stepped(by_muon, SHAPES)
    sizes = []

    def counted(matrices):
        sizes.append(len(matrices))
        return orthogonalize(matrices)

    monkeypatch.setattr(orthogonal, "orthogonalize", counted)
    monkeypatch.setattr(orthogonal, "_LARGEST", 2 * 24 * 40)
    cut, _ = stepped(by_muon, SHAPES)
    assert max(sizes) == 2  # of three of one shape
    for matrix, expected, start in zip(cut, whole, before, strict=True):
        assert_steps_alike(matrix, expected, start)


def test_a_gradient_of_zero_moves_nothing():
    matrix = torch.nn.Parameter(torch.randn(8, 4))
    before = matrix.detach().clone()
    matrix.grad = torch.zeros(8, 4)
    by_muon([{"params": [matrix], "lr": 1.0, "weight_decay": 0.0}]).step()
    assert torch.equal(matrix, before)


def test_a_step_is_as_large_in_every_direction_and_as_adamws_on_the_whole():
    """Against what Muon is about: the orthogonal matrix of the gradient's singular vectors."""
    layer = torch.nn.Linear(24, 40, bias=False)
    groups = split_for_muon(
        [{"name": "decay", "params": [layer.weight], "lr": 1e-2, "weight_decay": 0.0}],
        torch.nn.Sequential(layer),
        tables=(),
    )
    optimizer = MuonBeside(groups, torch.optim.AdamW)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(layer.weight.grad, full_matrices=False)
    optimizer.step()
    step = before - layer.weight.detach()
    unit = step / (1e-2 * 0.2 * math.sqrt(40))
    sizes = torch.linalg.svdvals(unit)
    assert 0.6 < sizes.min() < sizes.max() < 1.3  # five Newton-Schulz iterations come this near
    assert torch.nn.functional.cosine_similarity(
        unit.flatten(), (left @ right).flatten(), dim=0
    ) == pytest.approx(1, abs=0.03)
    # AdamW's step has a root mean square of 0.2 to 0.4 times the rate in training.
    assert 0.1 < step.square().mean().sqrt() / 1e-2 < 0.3


def test_a_state_that_was_loaded_goes_on_as_it_would_have():
    """As accelerate does at the start: other groups and another state come into their places."""
    whole = grown(memory=BYPASS).train()
    halves = copy.deepcopy(whole)
    optimizer, first = (make_optimizer(model, options(), ADAMW) for model in (whole, halves))
    second = make_optimizer(halves, options(lr=1.0), ADAMW)
    for number in range(4):
        step(whole, optimizer)
        if number == 2:
            second.load_state_dict(first.state_dict())
        step(halves, first if number < 2 else second)
    for name, parameter in halves.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.parametrize("stage", ["cpt", "sft"])
def test_a_run_learns_and_resumes_to_the_same_bits(tmp_path, stage):
    optimizer = {"recipe": "short", "matrices": "muon"}
    whole = make_options(tmp_path, stage=stage, optimizer=optimizer)
    trainer, _ = make_trainer(whole)
    assert isinstance(trainer.create_optimizer(), MuonBeside)
    result = train(whole)
    assert result.losses["after_loss"] < result.losses["before_loss"]
    again = make_options(tmp_path, output="again", stage=stage, optimizer=optimizer)
    assert_resumes_alike(again, result)
    plain = train(make_options(tmp_path, output="plain", stage=stage))
    assert plain.losses["after_loss"] != result.losses["after_loss"]


def test_matrices_that_are_split_are_refused(tmp_path):
    run = make_options(tmp_path, sharding="fsdp2", optimizer={"matrices": "muon"})
    with pytest.raises(MidusError, match="needs whole matrices, and sharding=fsdp2 splits them"):
        make_trainer(run, world_size=2)


def test_what_steps_no_matrices_is_refused():
    with pytest.raises(MidusError, match=r"optimizer\.matrices='sgd'.*adamw, muon"):
        OptimizerOptions(matrices="sgd")

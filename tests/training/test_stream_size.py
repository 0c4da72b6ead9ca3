"""The size of the stream before blocks, and rates that go with it."""

import math
import statistics

import pytest
import torch
from runs import assert_resumes_alike, make_options
from tiny import grown, prompt_ids, tiny_base

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.errors import MidusError
from midus.models.block import MemoryBlock
from midus.training.optim import constant_memory_schedule, group_name, parameter_groups
from midus.training.optimizer_options import PartOptions
from midus.training.run import make_trainer, train
from midus.training.stream_size import FIRST, stream_sizes, streams_of_memory
from midus.training.watching import read_metrics

PARTS = {"values": {"lr": 0.02, "by_stream": True}, "keys": {"lr": 1e-3}}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("length", [16, 2 * FIRST])
def test_sizes_are_those_of_the_hidden_states(family, length):
    model, ids = tiny_base(family).train(), prompt_ids(3, length)
    states = model.eval()(ids, output_hidden_states=True).hidden_states
    begin = FIRST if length > 2 * FIRST else 0
    expected = [
        state[:, begin:].square().mean(-1).sqrt().flatten().median().item()
        for state in states[:-1]  # the last one is what the head reads
    ]
    model.train()
    assert stream_sizes(model, model.model.layers, ids.split(2)) == pytest.approx(expected)
    assert model.training
    assert not any(block._forward_pre_hooks for block in model.model.layers)


def test_those_of_memory_blocks_are_the_bases_where_they_stand():
    ids = prompt_ids(3, 16)
    model = upscale(tiny_base(), UpscaleConfig())
    layers = list(model.model.layers)
    places = [i for i, block in enumerate(layers) if isinstance(block, MemoryBlock)]
    everywhere = stream_sizes(model, layers, [ids])
    assert streams_of_memory(model, [ids]) == [everywhere[i] for i in places]
    # A fresh block hands on what it got, to its anchor.
    assert [everywhere[i] for i in places] == [everywhere[i + 1] for i in places]


def test_each_block_has_its_rate_and_their_geometric_mean_is_as_given():
    model = grown(memory=MemoryConfig(num_subkeys=8, bypass="stream"))
    parts = {
        "values": PartOptions(lr=0.5, by_stream=True, schedule="linear"),
        "bypass": PartOptions(lr=0.1),
    }
    groups = parameter_groups(model, 1e-3, 1e-2, parts=parts, streams=[2.0, 18.0])
    by_name = {group_name(group): group for group in groups}
    assert len(by_name) == len(groups)
    assert set(by_name) >= {"values/0", "values/1", "bypass", "memory", "decay"}
    rates = [by_name[f"values/{block}"]["lr"] for block in (0, 1)]
    assert rates == pytest.approx([0.5 / 3, 0.5 * 3])
    assert statistics.geometric_mean(rates) == pytest.approx(0.5)
    assert by_name["bypass"]["lr"] == 0.1
    blocks = [block for block in model.modules() if isinstance(block, MemoryBlock)]
    for block, number in zip(blocks, (0, 1), strict=True):
        (values,) = by_name[f"values/{number}"]["params"]
        assert values is block.memory.values.latent_values
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(groups)
    schedule = constant_memory_schedule(optimizer, 10, 0.0, "constant", parts=parts)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    halved = [group["lr"] for group in optimizer.param_groups if group["name"] == "values"]
    assert halved == pytest.approx([0.25 / 3, 0.25 * 3])


def test_without_sizes_all_blocks_have_the_rate_that_is_given():
    parts = {"values": PartOptions(lr=0.5, by_stream=True)}
    groups = {group["name"]: group for group in parameter_groups(grown(), 1e-3, parts=parts)}
    assert (groups["values"]["lr"], len(groups["values"]["params"])) == (0.5, 2)


def test_a_run_measures_says_and_logs_them_and_resumes_to_the_same_bits(tmp_path):
    said = []
    optimizer = {"recipe": "short", "parts": PARTS}
    whole = make_options(tmp_path, optimizer=optimizer)
    trainer, start = make_trainer(whole, say=said.append)
    assert any("the stream has size" in line for line in said)
    ids = torch.stack([row["input_ids"] for row in list(trainer.train_dataset)])
    sizes = streams_of_memory(start.model, [ids])
    assert trainer.streams == pytest.approx(sizes, rel=1e-3)
    assert sizes[0] != pytest.approx(sizes[1], rel=1e-3)
    result = train(whole)
    (first, *_) = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    ratio = first["lr/values/1"] / first["lr/values/0"]
    assert ratio == pytest.approx(trainer.streams[1] / trainer.streams[0])
    assert math.sqrt(first["lr/values/1"] * first["lr/values/0"]) == pytest.approx(0.02)

    again = make_options(tmp_path, output="again", optimizer=optimizer)
    assert_resumes_alike(again, result)
    assert result.losses["after_loss"] < result.losses["before_loss"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stage": "sft"}, "by_stream in optimizer.parts is for stage cpt without sharding"),
        ({"upscale": {"method": "llama_pro"}}, "needs memory blocks"),
    ],
    ids=["sft", "copied"],
)
def test_where_there_is_no_such_stream_it_is_refused(tmp_path, changed, message):
    options = make_options(tmp_path, optimizer={"recipe": "short", "parts": PARTS}, **changed)
    with pytest.raises(MidusError, match=message):
        make_trainer(options)


def test_what_is_no_truth_value_is_refused():
    with pytest.raises(MidusError, match="by_stream of a part='yes' must be true or false"):
        PartOptions(by_stream="yes")

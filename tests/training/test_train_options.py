"""Options from YAML: checked, overridden, resolved."""

from dataclasses import fields

import pytest
import yaml

from midus import MidusError
from midus.config import field_help
from midus.training.optimizer_options import OptimizerOptions
from midus.training.options import TrainOptions, read_options
from midus.training.reading import read_yaml

RUN = {
    "stage": "cpt",
    "model": "smollm2-135m",
    "output": "runs/x",
    "upscale": {"method": "midus", "memory": {"num_subkeys": 32}},
    "data": {"sources": [{"path": "a.jsonl", "weight": 2}, "b.txt"]},
    "trainer": {"max_steps": 5},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def test_nested_options_are_read(file):
    options = read_options(file)
    assert options.upscale.memory.num_subkeys == 32
    assert [source.weight for source in options.data.sources] == [2, 1.0]
    assert options.trainer == {"max_steps": 5}


def test_overrides_reach_everywhere_and_numbers_are_numbers(file):
    options = read_options(
        file,
        [
            "optimizer.lr=5e-5",
            "upscale.memory.top_k=2",
            "data.sources.0.weight=0.5",
            "trainer.max_steps=7",
            "upscale.positions=[1,3]",
        ],
    )
    assert options.optimizer.lr == 5e-5
    assert options.upscale.memory.top_k == 2
    assert options.data.sources[0].weight == 0.5
    assert options.trainer["max_steps"] == 7
    assert options.upscale.positions == (1, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stge=cpt", "unknown option stge"),
        ("upscale.memory.heads=3", "unknown option upscale.memory.heads"),
        ("optimizer.lrr=3", "unknown option optimizer.lrr"),
        ("data.source=x", "unknown option"),
        ("recip=short", "unknown option recip; known options: recipe, stage"),
        ("stage=rl", "stage='rl' is unknown"),
        ("optimizer.recipe=fast", "optimizer.recipe='fast' is unknown"),
        ("optimizer.lr=-1", "optimizer.lr=-1 must be a number"),
        ("optimizer.lr=much", "optimizer.lr='much' must be a number"),
        ("precision=fp8", "precision='fp8' is unknown"),
        ("trainer.learning_rate=1", "trainer.learning_rate is said elsewhere; use optimizer.lr"),
        ("trainer.gradient_accumulation_steps=2", "use batch_size"),
        ("batch_size=0", "batch_size=0 must be a positive whole number"),
        ("upscale.memory.top_k=999", "top_k=999"),
        ("control=lora", None),
        ("seed=-1", "seed=-1 must be a whole number"),
        ("seed=abc", "seed='abc' must be a whole number"),
        ("seed=4294967296", "seed=4294967296 must be a whole number from 0 to 4294967295"),
        ("keep_best=maybe", "keep_best='maybe' must be true or false"),
        ("fused_blocks=maybe", "fused_blocks='maybe' must be true or false"),
        ("early_stopping_patience=true", "early_stopping_patience=True must be"),
        ("attention=3", "attention=3 must be a name"),
        ("trainer.adam_beta2=0.5", "use optimizer.adam_beta2"),
        ("trainer.save_only_model=true", "trainer.save_only_model is said elsewhere"),
        ("noequals", "must be a key and a value"),
        ("data.sources.7.weight=1", "there is no '7'"),
        ("data.sources.².weight=1", "there is no '²'"),
        ("data.sources.²=1", "there is no '²'"),
        ("trainer.run_name=2024-01-01", "trainer.run_name=datetime.date"),
        ("trainer.run_name=2024-13-01", "'2024-13-01' is no YAML value"),
        ("trainer={1: 2}", "trainer.1 is no argument"),
        ("data=&a {sources: [*a]}", "holds a list or mapping within itself"),
    ],
)
def test_bad_options_are_named(file, override, message):
    if message is None:
        assert read_options(file, [override]).control == "lora"
        return
    with pytest.raises(MidusError, match=message.replace(".", r"\.").replace("[", r"\[")):
        read_options(file, [override])


@pytest.mark.parametrize("text", ["data: &a {sources: [*a]}\n", "stage: 2024-13-01\n"])
def test_a_file_that_yaml_cannot_make_options_of_is_refused(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(MidusError, match=r"run\.yaml (holds a list|is not valid YAML \(month)"):
        read_options(path)


def test_an_override_changes_one_of_two_that_yaml_wrote_once(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "stage: cpt\nmodel: m\noutput: o\ndata: {sources: [a]}\n"
        "optimizer: {parts: {keys: &one {lr: 1e-3}, values: *one}}\n"
    )
    parts = read_options(path, ["optimizer.parts.keys.lr=1e-2"]).optimizer.parts
    assert (parts["keys"].lr, parts["values"].lr) == (1e-2, 1e-3)


def test_control_needs_something_to_stand_against(file):
    with pytest.raises(MidusError, match="as many trainable parameters"):
        read_options(file, ["control=lora", "upscale=null"])


def test_a_key_that_stands_twice_is_refused(tmp_path, file):
    path = tmp_path / "twice.yaml"
    path.write_text(
        file.read_text() + "\noptimizer: {matrices: muon}\noptimizer: {recipe: short}\n"
    )
    with pytest.raises(MidusError, match=r"is not valid YAML .*optimizer is given twice"):
        read_options(path)


def test_a_merged_mapping_may_say_a_key_again(tmp_path):
    path = tmp_path / "merged.yaml"
    path.write_text(
        "deep: {one: {two: &own {<<: &usual {lr: 1, beta: 2}, lr: 3}}}\nlast: {<<: *own, beta: 4}\n"
    )
    values = read_yaml(path, [], "stage: cpt")
    assert values["deep"]["one"]["two"] == {"lr": 3, "beta": 2}
    assert values["last"] == {"lr": 3, "beta": 4}


def test_missing_options_are_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("stage: cpt\nmodel: m\n")
    with pytest.raises(MidusError, match="output is missing"):
        read_options(path)


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "\x00"])
def test_files_that_are_no_options_are_refused(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(MidusError, match=r"run\.yaml"):
        read_options(path)


def test_resolved_options_survive_a_round_trip(file):
    options = read_options(file)
    assert TrainOptions.from_dict(options.to_dict()) == options


def test_recipes_fill_what_is_not_given():
    paper = OptimizerOptions().resolved("cpt")
    assert (paper.lr, paper.memory_lr, paper.weight_decay) == (1e-4, 1e-4, 1e-6)
    assert OptimizerOptions().resolved("sft").lr == 1e-5
    short = OptimizerOptions(recipe="short", lr=2e-3).resolved("cpt")
    assert (short.lr, short.memory_lr) == (2e-3, 1e-2)
    given = OptimizerOptions(lr=3e-4).resolved("cpt")
    assert given.memory_lr == 3e-4  # the paper's: the largest rate of the schedule


@pytest.mark.parametrize("cls", [TrainOptions, OptimizerOptions])
def test_every_option_is_explained(cls):
    assert set(field_help(cls)) == {field.name for field in fields(cls)}

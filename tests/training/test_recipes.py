"""A recipe fills what a file leaves out, and nothing else."""

import copy

import pytest
import yaml
from tiny import grown

from midus.errors import MidusError
from midus.studies.grid import search_trials
from midus.studies.options import read_study
from midus.training.optim import groups_of
from midus.training.options import TrainOptions, read_options
from midus.training.recipes import RUN_RECIPES

FILE = {"stage": "cpt", "model": "m", "output": "o", "recipe": "short", "data": {"sources": "t"}}
MEMORY = {
    "kind": "hml",
    "values": "independent",
    "num_subkeys": 28,
    "attention_residual": True,
    "query_norm": "layer",
    "key_scale": 3.5,
}
KEYS = {"lr": 1e-2, "schedule": "cosine", "warmup_ratio": 0.02}
BY_MUON = {
    "recipe": "short",
    "matrices": "muon",
    "relative_lr": 0.042,
    "for_steps": 400,
    "schedule": "linear",
    "warmup_ratio": 0.02,
}
STEADY = {"for_steps": 400, "schedule": "constant", "warmup_ratio": 0.02}
WRITTEN_OUT = {
    "key_start": "queries",
    "optimizer": {
        **BY_MUON,
        "parts": {
            "values": {"relative_lr": 0.053, "steps_power": 0.5, **STEADY},
            "keys": KEYS,
            "bypass": {"by_stream": True},
        },
    },
    "upscale": {
        "method": "midus",
        "placement": "dense",
        "memory": {**MEMORY, "num_subkeys": 16, "top_k": 8, "bypass": "joined"},
    },
}
HALF = {
    "key_start": "queries",
    "optimizer": {
        **BY_MUON,
        "parts": {
            "values": {"relative_lr": 0.026, "steps_power": 1.0, "by_stream": True, **STEADY},
            "keys": KEYS,
            "bypass": {"by_stream": True},
            "output_proj": {"by_stream": True},
        },
    },
    "upscale": {
        "method": "midus",
        "memory": {**MEMORY, "bypass": "attention", "memory_output_proj": True},
    },
}
BY_ADAMW = {
    "key_start": "queries",
    "optimizer": {
        "recipe": "short",
        "relative_lr": 0.032,
        "parts": {
            "values": {"relative_lr": 0.16, "schedule": "cosine", "warmup_ratio": 0.02},
            "keys": KEYS,
        },
    },
    "upscale": {"method": "midus", "memory": {**MEMORY, "bypass": "both"}},
}


def without_recipe(**more):
    return {name: value for name, value in FILE.items() if name != "recipe"} | more


@pytest.mark.parametrize(
    ("name", "written_out"),
    [("short", WRITTEN_OUT), ("short_half", HALF), ("short_adamw", BY_ADAMW)],
)
def test_it_is_what_it_writes_out(name, written_out):
    options = TrainOptions.from_dict(FILE | {"recipe": name})
    assert options == TrainOptions.from_dict(without_recipe(**written_out))
    assert options != TrainOptions.from_dict(without_recipe())


def test_a_run_saves_plain_options():
    saved = TrainOptions.from_dict(FILE).to_dict()
    assert "recipe" not in saved
    assert TrainOptions.from_dict(saved) == TrainOptions.from_dict(FILE)


def test_what_the_file_says_counts():
    own = FILE | {
        "key_start": "random",
        "optimizer": {"lr": 6e-3, "parts": {"values": {"lr": 1e-2}, "attention": {"lr": 1e-3}}},
        "upscale": {"num_inserted": 4, "memory": {"num_subkeys": 12}},
    }
    options = TrainOptions.from_dict(own)
    assert options.key_start == "random"
    assert options.optimizer.lr == 6e-3
    assert options.optimizer.relative_lr is None
    assert options.optimizer.parts["values"].lr == 1e-2
    assert options.optimizer.parts["values"].relative_lr is None
    assert options.optimizer.parts["values"].schedule == "constant"
    assert options.optimizer.parts["attention"].lr == 1e-3
    assert options.upscale.num_inserted == 4
    assert options.upscale.placement == "dense"
    assert options.upscale.memory.num_subkeys == 12
    assert options.upscale.memory.bypass == "joined"
    assert own["upscale"] == {"num_inserted": 4, "memory": {"num_subkeys": 12}}  # as it was


def test_positions_stand_in_the_place_of_a_placement():
    options = TrainOptions.from_dict(FILE | {"upscale": {"positions": [1, 3]}})
    assert (options.upscale.positions, options.upscale.placement) == ((1, 3), None)
    own = FILE | {"upscale": {"placement": "distributed"}}
    assert TrainOptions.from_dict(own).upscale.placement == "distributed"


def test_a_rate_and_a_multiple_of_the_weights_stand_for_each_other():
    own = FILE | {"optimizer": {"parts": {"keys": {"relative_lr": 0.1}}}}
    options = TrainOptions.from_dict(own).optimizer
    assert (options.lr, options.relative_lr) == (None, 0.042)
    assert (options.parts["keys"].lr, options.parts["keys"].relative_lr) == (None, 0.1)


@pytest.mark.parametrize("rate", ["lr", "relative_lr"])
def test_a_rate_of_the_files_own_is_for_any_number_of_steps(rate):
    own = FILE | {"optimizer": {rate: 0.01, "parts": {"values": {rate: 0.02}}}}
    options = TrainOptions.from_dict(own).optimizer
    assert not options.goes_with_steps
    assert (options.steps_power, options.parts["values"].steps_power) == (None, None)
    assert (getattr(options, rate), getattr(options.parts["values"], rate)) == (0.01, 0.02)


@pytest.mark.parametrize("name", RUN_RECIPES)
def test_a_rate_for_keys_and_values_takes_the_place_of_the_recipes(name):
    own = FILE | {"recipe": name, "optimizer": {"memory_lr": 1e-4}}
    options = TrainOptions.from_dict(own).optimizer
    recipes = TrainOptions.from_dict(FILE | {"recipe": name}).optimizer
    groups = groups_of(grown(), options.absolute(0.5, 100))
    assert {group["lr"] for group in groups if group["name"] in ("keys", "values")} == {1e-4}
    assert options.relative_lr == recipes.relative_lr
    for part in ("keys", "values"):  # how they go on is the recipe's still
        assert options.parts[part].schedule == recipes.parts[part].schedule
        assert options.parts[part].by_stream == recipes.parts[part].by_stream
    own["optimizer"]["parts"] = {"values": {"lr": 2e-4}}
    assert TrainOptions.from_dict(own).optimizer.parts["values"].lr == 2e-4


def test_sections_left_empty_are_filled():
    empty = FILE | {"optimizer": None, "upscale": {"memory": None}}
    assert TrainOptions.from_dict(empty) == TrainOptions.from_dict(FILE)


def test_it_can_be_set_and_taken_back(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(without_recipe()))
    assert read_options(path, ["recipe=short"]) == TrainOptions.from_dict(FILE)
    path.write_text(yaml.safe_dump(FILE))
    assert read_options(path, ["recipe=null"]) == TrainOptions.from_dict(without_recipe())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"recipe": "long"},
            "recipe='long' is unknown; choose one of short, short_half, short_adamw",
        ),
        ({"recipe": ["short"]}, "is unknown"),
        ({"stage": "sft"}, "use it with stage: cpt"),
        ({"upscale": {"method": "llama_pro"}}, "recipe='short' is for MIDUS-HML"),
        ({"upscale": {"memory": {"kind": "pkm"}}}, "upscale.memory.kind='pkm'"),
        ({"control": "lora"}, "control='lora' trains none"),
        ({"upscale": "midus"}, "upscale='midus' must be a mapping"),
        ({"optimizer": {"parts": {"keys": 1}}}, "optimizer.parts.keys=1 must be a mapping"),
    ],
)
def test_what_it_is_not_for_is_refused(changed, message):
    with pytest.raises(MidusError, match=message.replace("[", r"\[")):
        TrainOptions.from_dict(FILE | changed)


def test_a_studys_method_can_be_a_recipe(tmp_path):
    written_out = copy.deepcopy(WRITTEN_OUT)
    del written_out["optimizer"]["relative_lr"]  # the search has the rate
    del written_out["optimizer"]["for_steps"]
    grid = {
        "name": "x",
        "run": {"model": "m", "data": {"sources": "t", "seq_len": 8, "max_tokens": 640}},
        "methods": {"a": {"set": {"recipe": "short"}}, "b": {"set": written_out}},
        "search": {"optimizer.lr": [1e-3]},
        "seeds": [0, 1000],
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    trials = search_trials(read_study(path))
    first, second = ([t.options for t in trials if t.method == name] for name in "ab")
    assert first == second
    assert [options.optimizer.lr for options in first] == [1e-3, 1e-3]
    assert [options.upscale.seed for options in first] == [0, 1000]

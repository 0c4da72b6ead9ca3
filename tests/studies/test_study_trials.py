"""What a grid comes to: combinations, keys, and what is refused before anything runs."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from small import HML, make_study

from midus.errors import MidusError
from midus.models.shapes import shape_config
from midus.studies.checking import check_trials
from midus.studies.grid import final_trials, search_trials
from midus.studies.options import StudyOptions, read_study
from midus.studies.trials import hash_facts, trial_key

GRIDS = sorted((Path(__file__).parents[2] / "studies").glob("*.yaml"))
PLACES = {"base": "somewhere", "tokens": "elsewhere"}


def settings(study):
    return [(t.method, t.setting, t.seed) for t in search_trials(study)]


def test_every_method_tries_every_combination_with_every_seed():
    search = {"optimizer.lr": [1e-3, 1e-2], "optimizer.warmup_ratio": [0.1]}
    study = make_study(PLACES, search=search, seeds=[3, 4])
    assert settings(study) == [
        (method, f"lr={lr}, warmup_ratio=0.1", seed)
        for method in ("full", "hml")
        for lr in ("0.001", "0.01")
        for seed in (3, 4)
    ]


def test_options_that_came_later_leave_the_keys_of_those_without_them():
    method = {**HML, "optimizer.parts": {"values": {"lr": 1e-2}}}
    study = make_study(PLACES, methods={"one": {"set": method}}, search={})
    (trial,) = search_trials(study)
    facts = trial.options.to_dict()
    for name in ("model", "output", "data", "cuda_graphs"):
        del facts[name]
    assert facts["optimizer"].pop("relative_lr") is None
    assert facts["optimizer"].pop("matrices") == "adamw"
    values = facts["optimizer"]["parts"]["values"]
    for own in (facts["optimizer"], values):
        assert (own.pop("for_steps"), own.pop("steps_power")) == (None, None)
    assert (values.pop("relative_lr"), values.pop("by_stream")) == (None, False)
    assert values.pop("decay_ratio") is None
    data = trial.options.data
    facts |= {"seq_len": data.seq_len, "max_tokens": data.max_tokens}
    assert trial.key("id") == hash_facts({"options": facts, "identity": "id"})
    keys = {trial.key("id")}
    for later in (
        {"optimizer.parts": {"values": {"lr": 1e-2, "by_stream": True}}},
        {"optimizer.parts": {"values": {"lr": 1e-2, "decay_ratio": 0.5}}},
        {"optimizer.matrices": "muon"},
        {"optimizer.relative_lr": 0.1},
        {"optimizer.relative_lr": 0.1, "optimizer.for_steps": 400},
        {"optimizer.relative_lr": 0.1, "optimizer.for_steps": 400, "optimizer.steps_power": 1.0},
    ):
        study = make_study(PLACES, methods={"one": {"set": method | later}}, search={})
        keys.add(search_trials(study)[0].key("id"))
    assert len(keys) == 7


def test_a_trial_has_the_options_of_run_method_search_and_seed():
    study = make_study(PLACES, run={"batch_size": 2}, seeds=[7])
    trial = search_trials(study)[-1]
    options = trial.options
    assert (options.batch_size, options.optimizer.lr, options.optimizer.memory_lr) == (
        2,
        0.01,
        0.01,
    )
    assert (options.upscale.memory.num_subkeys, options.upscale.seed, options.seed) == (8, 7, 7)
    assert options.trainer["max_steps"] == 16  # 512 tokens of 2 x 16 a step
    assert search_trials(study)[0].options.upscale is None


def test_one_setting_at_a_time_is_varied_besides_the_search():
    vary = {"upscale.memory.top_k": [1, 2], "optimizer.parts.values.lr": [0.1]}
    study = make_study(PLACES, methods={"hml": {"set": HML, "vary": vary}})
    assert [setting for _, setting, _ in settings(study)] == [
        f"lr={lr}{alone}"
        for alone in ("", ", top_k=1", ", top_k=2", ", values.lr=0.1")
        for lr in ("0.001", "0.01")
    ]


def test_unequal_numbers_of_trials_are_refused_unless_asked_for():
    methods = {"full": {}, "hml": {"set": HML, "search": {"optimizer.lr": [1e-3, 1e-2, 1e-1]}}}
    with pytest.raises(MidusError, match="hml has 3 trials and full has 2, which favours"):
        search_trials(make_study(PLACES, methods=methods))
    assert len(search_trials(make_study(PLACES, methods=methods, equal_trials=False))) == 5


def test_final_trials_are_those_of_the_search_where_seeds_are():
    study = make_study(PLACES, final_seeds=[0, 5])
    searched = {t.key("same") for t in search_trials(study)}
    finals = final_trials(study, "hml", {"optimizer.lr": 0.01})
    assert [t.key("same") in searched for t in finals] == [True, False]


@pytest.mark.parametrize(
    ("search", "own", "finals"),
    [
        ({}, {}, [True, False]),
        ({"optimizer.lr": [1e-3]}, {}, [True, False]),
        ({"optimizer.lr": [1e-3, 1e-2]}, {}, [False] * 4),
        ({}, {"final_tokens": 1024}, [False, False]),
        ({}, {"final_seeds": []}, [False, False]),
    ],
)
def test_where_nothing_is_chosen_trials_of_final_seeds_are_final(search, own, finals):
    own = {"final_seeds": [0, 5], "seeds": [0, 1], **own}
    methods = {"full": {"keep": bool(own["final_seeds"])}}
    trials = search_trials(make_study(PLACES, methods=methods, search=search, **own))
    assert [trial.is_final for trial in trials] == finals
    assert [trial.keep for trial in trials] == finals


def test_a_key_follows_everything_but_places():
    study = make_study(PLACES)
    keys = [t.key("a") for t in search_trials(study)]
    assert len(set(keys)) == 4
    moved = make_study({"base": "here", "tokens": "there"})
    assert [t.key("a") for t in search_trials(moved)] == keys
    assert [t.key("b") for t in search_trials(study)] != keys
    options = search_trials(study)[0].options
    for other in (
        replace(options, seed=1),
        replace(options, precision="mixed"),
        replace(options, data=replace(options.data, seq_len=8)),
        replace(options, data=replace(options.data, max_tokens=1000)),
        replace(options, optimizer=replace(options.optimizer, decay_ratio=0.5)),
    ):
        assert trial_key(other, "a") not in keys


def full(**options):
    return {"methods": {"full": options}}


KINDS = [
    ({"measure": None}, "measure=None must be a list"),
    *[({"texts": value}, "texts=.* must be a mapping") for value in (None, ["a"])],
    ({"texts": {"a": 5}}, "texts.a=5 must be a file"),
    *[(full(set=value), "set=.* of a method must be a mapping") for value in (None, [1])],
    ({"search": {1: [2]}}, "search=.* must give each option a list"),
    (full(label=5), "label=5 of a method must be a text"),
    ({"methods": {1: {}}}, "methods=.* must be a mapping by names"),
    ({"equal_trials": "no"}, "equal_trials='no' must be true or false"),
    (full(keep="no"), "keep='no' of a method must be true or false"),
    (full(keep=True), "methods.full.keep keeps final models; give final_seeds"),
    ({"name": None}, "name=None must be a text"),
    (full(set={"upscale": 5}), "methods.full: upscale=5 must be a mapping"),
]
IGNORED = [
    *[
        (full(set=own), f"methods.full: {name} has no effect in a study")
        for name, own in {
            "load_in_4bit": {"load_in_4bit": True},
            "sharding": {"sharding": "fsdp2"},
            "max_length": {"max_length": 7},
            "trainer.gradient_checkpointing": {"trainer": {"gradient_checkpointing": True}},
            "trainer.use_cpu": {"trainer.use_cpu": True},
            "data.held_out": {"data.held_out": 0.5},
        }.items()
    ],
    *[
        (full(set=own), f"methods.full.set.{name} is said elsewhere")
        for name, own in {
            "stage": {"stage": "sft"},
            "seed": {"seed": 3},
            "output": {"output": "x"},
            "upscale.seed": {"upscale": {"seed": 3}},
        }.items()
    ],
    ({"search": {"seed": [1, 2]}}, "search.seed is said elsewhere"),
    (full(vary={"upscale.seed": [1]}), "search.upscale.seed is said elsewhere"),
]
REPEATED = [
    ({"seeds": [1, 1]}, "seeds=.* each once"),
    ({"final_seeds": [2, 3, 2]}, "final_seeds=.* each once"),
    ({"search": {"optimizer.lr": [1e-3, "1e-3"]}}, "full has two trials with the same options"),
    ({"search": {"optimizer.lr": [1, 1.0]}}, "two trials with the same options"),
    (full(vary={"optimizer.decay_ratio": [1.0]}), "two trials with the same options"),
    (full(vary={"cuda_graphs": [False]}), "two trials with the same options"),
]
UNEQUAL = [
    ({"methods": {"full": {}, "other": {"set": own}}}, f"trials differ in {name}")
    for name, own in {
        "precision": {"precision": "mixed"},
        "batch_size": {"batch_size": 2},
        "data.seq_len": {"data.seq_len": 8},
        "data.max_tokens, tokens read": {"data.max_tokens": 256},
        "data.sources": {"data.sources": "other"},
    }.items()
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"run": {"seed": 3}}, "run.seed is said elsewhere"),
        ({"run": {"trainer": {"max_steps": 3}}}, "follow from data.max_tokens"),
        ({"run": {"batch_size": 64}}, "less than one step"),
        ({"run": {"batchsize": 4}}, "methods.full: unknown option batchsize"),
        ({"search": {"optimizer.lr": 1e-3}}, "must give each option a list"),
        ({"methods": {}}, "methods is empty"),
        ({"seeds": [-1]}, "seeds=.* must be a list"),
        ({"final_seeds": [2**32]}, "final_seeds=.* from 0 to 4294967295, each once"),
        ({"measure": ["speed"]}, "measure='speed' is unknown"),
        ({"colour": 1}, "unknown option colour"),
        ({"methods": {"hml": {"sets": {}}}}, r"unknown option methods.hml.sets"),
        *KINDS,
        *IGNORED,
        *REPEATED,
        *UNEQUAL,
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(overrides, message):
    with pytest.raises(MidusError, match=message):
        search_trials(make_study(PLACES, **overrides))


@pytest.mark.parametrize("value", [None, 5, [1], {1: 2}])
def test_a_run_that_is_no_mapping_is_refused(value):
    with pytest.raises(MidusError, match=r"run=.* must be a mapping"):
        StudyOptions.from_dict({**make_study(PLACES).to_dict(), "run": value})


def test_a_trial_that_cannot_be_is_named_before_any_runs():
    methods = {"full": {}, "hml": {"set": {**HML, "upscale.num_inserted": 9}}}
    trials = search_trials(make_study(PLACES, methods=methods))
    with pytest.raises(MidusError, match=r"methods.hml: num_inserted=9 is out of range"):
        check_trials(trials, shape_config("tiny"))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"key_start": "queries"}, "key_start='queries' needs memory layers"),
        ({"key_start": "queries", "upscale.memory.kind": "linear"}, "key_start='queries' needs"),
        ({"key_start": "queries", "upscale.method": "llama_pro"}, "key_start='queries' needs"),
        ({"key_start": "queries", "control": "lora", **HML}, "key_start='queries' needs"),
        ({"trainer.optim": "lomo"}, "trainer.optim='.*' cannot be used here"),
        ({"trainer.per_device_train_batch_size": 3}, "is not a multiple"),
    ],
)
def test_what_only_the_model_or_this_machine_rules_out_is_told_before_any_runs(own, message):
    (trial,) = search_trials(make_study(PLACES, methods={"one": {"set": own}}, search={}))
    with pytest.raises(MidusError, match=f"methods.one: .*{message}"):
        check_trials([trial], shape_config("tiny"))


@pytest.mark.parametrize("kind", ["hml", "pkm"])
def test_keys_may_start_from_queries_where_there_are_product_keys(kind):
    own = {"key_start": "queries", "upscale.memory": {"kind": kind, "num_subkeys": 8}}
    (trial,) = search_trials(make_study(PLACES, methods={"one": {"set": own}}, search={}))
    check_trials([trial], shape_config("tiny"))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_every_grid_of_the_repository_can_be_run(path):
    study = read_study(path)
    trials = search_trials(study)
    shape = "tiny" if path.stem == "tiny" else "smollm2-135m"
    check_trials(trials, shape_config(shape))
    assert len({t.key("") for t in trials}) == len(trials)
    # Pass p of seed s is in the order of pass 0 of seed s + p.
    seeds = sorted({*study.seeds, *study.final_seeds})
    assert all(later - seed >= 100 for seed, later in itertools.pairwise(seeds))


def test_the_tokens_of_a_grid_can_be_set_as_the_page_says():
    page = (GRIDS[0].parents[1] / "docs" / "studies.md").read_text()
    (said,) = re.findall(r"--set (run.data.max_tokens=\S+?)`", page)
    study = read_study(GRIDS[-1], [said])
    assert {t.options.data.max_tokens for t in search_trials(study)} == {1_000_000}

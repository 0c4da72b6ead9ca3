"""Benchmark tasks in a study: the scores of `midus eval`, and trainings that do not notice them."""

import json
import random
import shutil
import statistics
import weakref

import numpy as np
import pytest
import torch
from evaluation.benchmarks import save_byte_model, words, write_benchmarks
from small import HML, Ticks, fake_row, make_study, report_of, rows_of
from transformers import set_seed

from midus.data.build import build_tokens
from midus.data.options import SourceOptions
from midus.errors import MidusError
from midus.evaluation import harness, language_model
from midus.studies import tasks as tasks_module
from midus.studies.grid import final_trials, search_trials
from midus.studies.loop import Loop
from midus.studies.material import Material
from midus.studies.options import StudyOptions
from midus.studies.report import make_report, to_markdown
from midus.studies.results import add_result, read_results
from midus.studies.run import run_study
from midus.studies.tasks import Tasks
from midus.studies.timing import Deadline
from midus.studies.workers import Worker

# As local files have them; the harness would put a title before BoolQ's passages.
NAMES = ["piqa", "boolq_untitled", "wikitext"]
ADDED = ("tasks", "tasks_mean", "tasks_of")


@pytest.fixture(scope="module")
def bytes_material(tmp_path_factory):
    """A base that reads any text, tokens, and files of benchmarks."""
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_model(folder / "base")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": words(i, 12)}) + "\n" for i in range(80)))
    tokens = build_tokens(
        [SourceOptions(path=str(text))],
        folder / "base",
        folder / "tokens",
        held_out=0.15,
        test=0.15,
    )
    data = write_benchmarks(folder / "data", num_docs=12)
    return {"base": str(folder / "base"), "tokens": str(tokens.path), "data": str(data)}


TWO_RATES = {"optimizer.lr": [1e-3, 1e-2]}


def tasks_study(material, tasks=(), **overrides):
    tasks = {"names": NAMES, "data": material["data"], "limit": 5, "batch_size": 4, **dict(tasks)}
    values = {
        "methods": {"full": {"keep": True}, "hml": {"set": HML, "keep": True}},
        "search": {},
        "final_seeds": [0, 5],
        "tasks": tasks,
        **overrides,
    }
    return make_study(material, **values)


@pytest.fixture(scope="module")
def measured(bytes_material, tmp_path_factory):
    """A study with tasks that has ended, its folder, and what it said."""
    out, said = tmp_path_factory.mktemp("measured"), []
    study = tasks_study(bytes_material, search=TWO_RATES)
    assert run_study(study, out, say=said.append).ran == 4 + 4
    return study, out, said


def without(row, *names):
    return {name: value for name, value in row.items() if name not in (*ADDED, "model", *names)}


def test_scores_are_those_of_midus_eval(midus, measured, bytes_material, tmp_path, monkeypatch):
    _, out, _ = measured
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path))
    rows = [row for row in rows_of(out) if row.get("model") or row["method"] == "untouched"]
    assert len(rows) == 5
    models = [out / row["model"] if row.get("model") else bytes_material["base"] for row in rows]
    data = ["--data-dir", bytes_material["data"], "--limit", 5, "--json", tmp_path / "t.json"]
    told = midus("eval", *models, "--tasks", ",".join(NAMES), *data)
    assert told.code == 0, told.err
    table = json.loads((tmp_path / "t.json").read_text())["rows"]
    for row, wanted in zip(rows, table, strict=True):
        for name in NAMES[:2]:
            score = wanted["scores"][name]
            assert row["tasks"][name] == {
                "acc": score["value"],
                "stderr": score["stderr"],
                "n": score["num_docs"],
            }
        perplexity = wanted["scores"]["wikitext"]["value"]
        assert row["tasks"]["wikitext"]["word_perplexity"] == pytest.approx(perplexity, rel=1e-4)
        shares = [row["tasks"][name]["acc"] for name in NAMES[:2]]
        assert row["tasks_mean"] == pytest.approx(statistics.mean(shares))


def test_the_search_has_no_tasks_and_its_trial_runs_again_as_a_final_one(measured):
    _, out, said = measured
    base, *rows = rows_of(out)
    assert (base["method"], "tasks" in base) == ("untouched", True)
    searched, finals = rows[:4], rows[4:]
    assert [(row["method"], "tasks" in row) for row in searched] == [
        (method, False) for method in ("full", "full", "hml", "hml")
    ]
    # Each final trial leaves its figures, then its scores, then where its model is.
    kinds = [(row["method"], row["seed"], "tasks" in row, "model" in row) for row in finals]
    assert kinds == [
        (method, seed, *has)
        for method in ("full", "hml")
        for seed in (0, 5)
        for has in ((False, False), (True, False), (True, True))
    ]
    assert "2 of 4 final trials ended without tasks and run again" in said
    assert said[:3] == [f"  task {name}" for name in NAMES]
    assert said[3].startswith("the base as it came: perplexity")
    assert f"tasks {100 * base['tasks_mean']:.2f} %" in said[3]


def test_a_method_with_nothing_to_choose_is_trained_once(bytes_material, tmp_path):
    study = tasks_study(bytes_material, {"names": ["piqa"]}, methods={"full": {"keep": True}})
    assert run_study(study, tmp_path).ran == 2
    kinds = [(row["seed"], "tasks" in row, "model" in row) for row in rows_of(tmp_path)[1:]]
    whole = [(False, False), (True, False), (True, True)]
    assert kinds == [(seed, *has) for seed in (0, 5) for has in whole]


def test_tasks_that_are_added_later_are_of_final_trials_alone(bytes_material, tmp_path):
    values = {"methods": {"full": {}}, "seeds": [0, 50], "final_seeds": [50]}
    study, said = tasks_study(bytes_material, {"names": ["piqa"]}, **values), []
    run_study(StudyOptions.from_dict({**study.to_dict(), "tasks": None}), tmp_path)
    assert run_study(study, tmp_path, say=said.append).ran == 1
    assert "1 of 1 final trials ended without tasks and run again" in said
    rows = read_results(tmp_path).values()
    assert [(row["seed"], "tasks" in row) for row in rows] == [(0, True), (0, False), (50, True)]


def test_tasks_change_no_bit_of_any_training_and_no_key(measured, bytes_material, tmp_path):
    _, out, _ = measured
    study = tasks_study(bytes_material, search=TWO_RATES)
    plain = StudyOptions.from_dict({**study.to_dict(), "tasks": None})
    run_study(plain, tmp_path)
    wanted = [without(row) for row in rows_of(tmp_path) if "model" not in row]
    found = [without(row) for row in rows_of(out) if "tasks" not in row]
    base = without(rows_of(out)[0])
    assert [base, *found] == wanted
    kept = [sorted(path.rglob("*.safetensors")) for path in (tmp_path, out)]
    assert len(kept[0]) == 4
    for left, right in zip(*kept, strict=True):
        assert left.read_bytes() == right.read_bytes()


def test_what_has_scores_is_not_measured_twice(measured, monkeypatch):
    study, out, _ = measured
    before = (out / "results.jsonl").read_bytes()
    monkeypatch.setattr(tasks_module, "run_task", lambda *_: pytest.fail("a task was run"))
    monkeypatch.setattr(Loop, "step", lambda *_: pytest.fail("a step was made"))
    assert run_study(study, out).ran == 0
    assert (out / "results.jsonl").read_bytes() == before


def test_a_study_stopped_between_tasks_goes_on_there(bytes_material, tmp_path, monkeypatch):
    methods = {"full": {"keep": True}}
    study = tasks_study(bytes_material, methods=methods, final_seeds=[5])
    run_study(study, tmp_path / "whole")
    ran, plain = [], tasks_module.run_task

    def watched(lm, task, limit):
        ran.append(task.name)
        return plain(lm, task, limit)

    monkeypatch.setattr(tasks_module, "run_task", watched)
    # Before each trial and step, then before each task: the search's 9, 9 of the final, 1 task.
    out = tmp_path / "stopped"
    first = run_study(study, out, deadline=Deadline(20, Ticks()))
    assert (first.is_out_of_time, first.left) == (True, 1)
    everything = ["piqa", "boolq", "wikitext"]
    assert ran == everything + everything[:1]
    monkeypatch.setattr(Loop, "step", lambda *_: pytest.fail("a step was made"))
    assert run_study(study, out).ran == 1
    assert ran == everything * 2
    assert not (out / "unfinished").exists()
    finals = [row for row in rows_of(out) if "model" in row]
    assert [row["tasks"] for row in finals] == [rows_of(tmp_path / "whole")[-1]["tasks"]]


def test_one_that_shared_its_device_has_no_speed_after_a_stop_between_tasks(
    bytes_material, tmp_path, monkeypatch
):
    study = tasks_study(bytes_material, methods={"full": {}}, final_seeds=[5])
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "is_alone", lambda _: False)
        assert run_study(study, tmp_path, deadline=Deadline(20, Ticks())).is_out_of_time
    assert run_study(study, tmp_path).ran == 1
    _, *trained = read_results(tmp_path).values()
    assert [row["tokens_per_second"] for row in trained] == [None, None]


def test_tasks_without_memory_beside_others_are_run_when_those_have_ended(
    bytes_material, tmp_path, monkeypatch
):
    study = tasks_study(bytes_material, methods={"full": {}}, final_seeds=[5])
    ran, plain = [], tasks_module.run_task

    def run_task(lm, task, limit):
        if task.name == "boolq" and ran.count("boolq") == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        ran.append(task.name)
        return plain(lm, task, limit)

    monkeypatch.setattr(tasks_module, "run_task", run_task)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "is_alone", lambda _: False)
        with pytest.raises(MidusError, match=r"1 could not; .*beside the other processes"):
            run_study(study, tmp_path)
    everything = ["piqa", "boolq", "wikitext"]
    assert ran == [*everything, "piqa", "wikitext"]
    monkeypatch.setattr(tasks_module, "run_task", lambda *args: ran.append("again") or plain(*args))
    monkeypatch.setattr(Loop, "step", lambda *_: pytest.fail("a step was made"))
    assert run_study(study, tmp_path).ran == 1
    assert ran[5:] == ["again"]
    (row,) = [row for row in read_results(tmp_path).values() if row["seed"] == 5]
    assert not any("error" in score for score in row["tasks"].values())


def test_other_tasks_are_measured_of_the_base_and_missed_aloud_of_the_rest(
    measured, bytes_material, tmp_path, monkeypatch
):
    study, out, _ = measured
    shutil.copytree(out, tmp_path / "copy")
    monkeypatch.setattr(Loop, "step", lambda *_: pytest.fail("a step was made"))
    values = study.to_dict()
    said = []
    more = StudyOptions.from_dict({**values, "tasks": {**values["tasks"], "limit": 3}})
    assert run_study(more, tmp_path / "copy", say=said.append).ran == 0
    assert said[-1].startswith("4 of 4 trials ended without the tasks as they are asked for; ")
    assert rows_of(tmp_path / "copy")[-1]["tasks"]["piqa"]["n"] == 3
    text = to_markdown(make_report(tmp_path / "copy"), [])
    assert "- full: 2 of 2 seeds have no scores of these tasks." in text
    (base,) = [line for line in text.splitlines() if line.startswith("| the base")]
    assert "| - | - | - | - | - | - |" not in base
    # A batch, and where files lie, change nothing.
    moved = shutil.copytree(bytes_material["data"], tmp_path / "data")
    same = tasks_study(bytes_material, {"data": str(moved), "batch_size": 1}).tasks
    assert Tasks(same, bytes_material["base"]).identity == rows_of(out)[0]["tasks_of"]


def test_the_report_has_a_column_a_task_and_their_mean(measured):
    _, out, _ = measured
    text = to_markdown(make_report(out), [])
    tasks = ["piqa, acc %", "boolq_untitled, acc %", "wikitext, word_perplexity", "tasks, mean %"]
    assert f"| test ppl | {' | '.join(tasks)} | tokens/s |" in text
    assert "Tasks are those of lm-evaluation-harness, at most the first 5 of each." in text
    rows = [row for row in rows_of(out) if row.get("model") and row["method"] == "hml"]
    cells = []
    for pick in (
        lambda row: 100 * row["tasks"]["piqa"]["acc"],
        lambda row: 100 * row["tasks"]["boolq_untitled"]["acc"],
        lambda row: row["tasks"]["wikitext"]["word_perplexity"],
        lambda row: 50 * (row["tasks"]["piqa"]["acc"] + row["tasks"]["boolq_untitled"]["acc"]),
    ):
        first, second = map(pick, rows)
        mean, deviation = (first + second) / 2, abs(first - second) / 2**0.5
        cells.append(f"{mean:,.2f} ± {deviation:,.2f}")
    (line,) = [line for line in text.splitlines() if line.startswith("| hml |")][:1]
    assert f"| {' | '.join(cells)} |" in line


def scored(acc, of="these", **extra):
    scores = {"piqa": {"acc": acc, "stderr": None, "n": 5, **extra}}
    return {"tasks": scores, "tasks_mean": acc, "tasks_of": of}


@pytest.mark.parametrize(
    ("seeds", "shown", "note"),
    [
        ([scored(0.5), scored(0.7)], "| 60.00 ± 14.14 | 60.00 ± 14.14 |", None),
        ([scored(0.5), {}], "| - | - |", "- full: 1 of 2 seeds have no scores of these tasks."),
        ([scored(0.7, of="others"), scored(0.5)], "| - | - |", "- full: 1 of 2 seeds have no"),
        ([scored(None, error="too long"), scored(0.5)], "| - | - |", "- full: piqa failed (too"),
    ],
    ids=["both", "one without", "one of other tasks", "one failed"],
)
def test_a_mean_over_some_of_the_seeds_is_not_shown(tmp_path, material, seeds, shown, note):
    values = {"methods": {"full": {}}, "search": {"optimizer.lr": [1e-3]}, "final_seeds": [5, 6]}
    values["tasks"] = {"names": ["piqa"]}
    finals = [("full", 1e-3, ["left", "left"])]
    report_of(tmp_path, material, [(1.0, 1.0)], finals, **values)
    study = make_study(material, **values)
    trials = final_trials(study, "full", {"optimizer.lr": 1e-3})
    for trial, extra in zip(trials, seeds, strict=True):
        add_result(tmp_path, fake_row(study, trial, (1.0, 1.0), **extra))
    text = to_markdown(make_report(tmp_path), [])
    assert f"| 10.000 ± 0.000 {shown} - | - |" in text
    assert note is None or note in text


def test_a_study_without_tasks_has_no_such_columns(tmp_path, material):
    text = to_markdown(report_of(tmp_path, material, [(1.0, 1.0)] * 4), [])
    assert "tasks" not in text.lower()


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"data": "nowhere"}, "tasks: data_dir='nowhere' is no folder"),
        (
            {"names": ["piqqa"], "suite": "general"},
            "tasks: task 'piqqa' is not in the suite .* piqa",
        ),
        ({"names": ["arc_easy"]}, "tasks: task 'arc_easy' reads .*test.jsonl.xz, which is missing"),
        ({"names": [], "suite": "longbench"}, "which is missing; put it there, or name the tasks"),
        ({"names": [], "suite": "zero"}, "tasks: suite='zero' is unknown"),
    ],
    ids=["folder", "task", "file", "file of a suite", "suite"],
)
def test_what_cannot_be_measured_is_refused_before_the_first_training(
    bytes_material, tmp_path, monkeypatch, tasks, message
):
    data = shutil.copytree(bytes_material["data"], tmp_path / "data")
    shutil.rmtree(data / "arc_easy")
    monkeypatch.setattr(Material, "__init__", lambda *_: pytest.fail("the base was loaded"))
    study = tasks_study(bytes_material, {"data": str(data), **tasks})
    with pytest.raises(MidusError, match=message):
        run_study(study, tmp_path / "out")


def test_a_missing_harness_or_tokenizer_is_refused_before_the_first_training(
    bytes_material, tmp_path, monkeypatch
):
    monkeypatch.setattr(Material, "__init__", lambda *_: pytest.fail("the base was loaded"))
    base = tmp_path / "base"
    shutil.copytree(bytes_material["base"], base, ignore=shutil.ignore_patterns("token*"))
    with pytest.raises(MidusError, match="tokenizer"):
        run_study(tasks_study({**bytes_material, "base": str(base)}), tmp_path / "out")
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MidusError, match=r"needs lm-evaluation-harness; run: pip install"):
        run_study(tasks_study(bytes_material), tmp_path / "out")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "names nothing to measure"),
        ({"suite": ["general"]}, "tasks.suite=.* must be a text"),
        ({"names": "piqa"}, r"tasks.names='piqa' must be a list"),
        ({"names": ["piqa"], "limit": 0}, "tasks.limit=0 must be a positive whole number or null"),
        ({"names": ["piqa"], "batch_size": "auto"}, "tasks.batch_size='auto' must be"),
        ({"names": ["piqa"], "shot": 1}, "unknown option tasks.shot"),
        ([], "tasks=.* must be a mapping"),
    ],
)
def test_options_that_say_nothing_are_refused(material, tasks, message):
    with pytest.raises(MidusError, match=message):
        make_study(material, final_seeds=[0], tasks=tasks)
    with pytest.raises(MidusError, match="tasks are measured of final models; give final_seeds"):
        make_study(material, tasks={"names": ["piqa"]})


@pytest.fixture
def piqa(bytes_material):
    """One task, and a model that is being trained."""
    study = tasks_study(bytes_material, {"names": ["piqa"]}, methods={"hml": {"set": HML}})
    (trial,) = search_trials(study)
    shared = Material(bytes_material["base"], bytes_material["tokens"], {})
    loop = Loop(shared.start(trial.options), trial.options, shared.sequences("train", 16, 512))
    loop.step()
    return Tasks(study.tasks, bytes_material["base"]), loop.model, trial.options


def chances():
    return random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002


def test_random_states_and_the_models_mode_are_left_as_they_were(piqa, monkeypatch):
    tasks, model, options = piqa
    plain, modes = tasks_module.run_task, []

    def careless(lm, task, limit):
        set_seed(1)
        modes.append((model.training, torch.is_grad_enabled()))
        return plain(lm, task, limit)

    monkeypatch.setattr(tasks_module, "run_task", careless)
    set_seed(7)
    wanted = chances()
    set_seed(7)
    assert tasks.measure(model, options, {})
    assert chances() == wanted
    assert modes == [(False, False)]
    assert all(module.training for module in model.modules())


def test_the_runs_precision_reaches_the_harness(piqa, monkeypatch):
    tasks, model, options = piqa
    kinds = []
    model.lm_head.register_forward_hook(lambda *args: kinds.append(args[2].dtype))
    assert tasks.measure(model, options, {})
    assert set(kinds) == {torch.float32}
    kinds.clear()
    mixed = lambda *_: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    monkeypatch.setattr(tasks_module, "computing", mixed)
    assert tasks.measure(model, options, {})
    assert set(kinds) == {torch.bfloat16}


def test_a_batch_that_memory_does_not_hold_is_halved(piqa, monkeypatch):
    tasks, model, options = piqa
    plain, sizes = tasks_module.run_task, []

    def small(largest):
        def run(lm, task, limit):
            sizes.append(lm.batch_size)
            if lm.batch_size > largest:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return plain(lm, task, limit)

        return run

    wanted, found, none = {}, {}, {}
    tasks.measure(model, options, wanted)
    monkeypatch.setattr(tasks_module, "run_task", small(1))
    tasks.measure(model, options, found)
    assert (sizes, found) == ([4, 2, 1], wanted)
    monkeypatch.setattr(tasks_module, "run_task", small(0))
    tasks.measure(model, options, none)
    row = tasks.scores(none)
    assert (row["tasks"]["piqa"]["acc"], row["tasks_mean"]) == (None, None)
    assert row["tasks"]["piqa"]["error"] == "memory does not hold a batch of one"


@pytest.mark.parametrize(
    ("kind", "said"), [(MidusError, "it gives"), (RuntimeError, "RuntimeError: it gives")]
)
def test_a_task_that_fails_costs_no_training_and_is_not_tried_again(
    bytes_material, tmp_path, monkeypatch, kind, said
):
    def fails(*_):
        raise kind("it gives a perplexity that is too large for a number")

    tasks = {"names": ["piqa"]}
    study = tasks_study(bytes_material, tasks, methods={"full": {}}, final_seeds=[0])
    monkeypatch.setattr(tasks_module, "run_task", fails)
    assert run_study(study, tmp_path).ran == 1
    assert [row.get("tasks_mean", "none") for row in rows_of(tmp_path)] == [None, "none", None]
    assert run_study(study, tmp_path).ran == 0
    assert f"- full: piqa failed ({said} a perplexity" in to_markdown(make_report(tmp_path), [])


def test_batches_hold_many_short_rows_and_few_long_ones(bytes_material, monkeypatch):
    batches, plain = {}, language_model.log_likelihoods
    current, run_task = [], tasks_module.run_task

    def watched(model, batch):
        widest = max(row.num_tokens for row in batch)
        batches.setdefault(current[-1], []).append((len(batch), widest))
        return plain(model, batch)

    monkeypatch.setattr(language_model, "log_likelihoods", watched)
    monkeypatch.setattr(
        tasks_module, "run_task", lambda *args: current.append(args[1].name) or run_task(*args)
    )
    monkeypatch.setattr(tasks_module, "_TOKENS_A_ROW", 150)
    study = tasks_study(bytes_material)
    model = Material(bytes_material["base"], bytes_material["tokens"], {}).base
    Tasks(study.tasks, bytes_material["base"]).measure(model, search_trials(study)[0].options, {})
    assert list(batches) == ["piqa", "boolq", "wikitext"]
    for sizes in batches.values():
        assert all(rows == 1 or rows * width <= 4 * 150 for rows, width in sizes)
    assert max(batches["wikitext"])[0] < 4 < max(batches["piqa"])[0]


def test_texts_are_cut_into_tokens_for_the_first_model_only(piqa, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    tasks, model, options = piqa
    first, second = {}, {}
    tasks.measure(model, options, first)
    monkeypatch.setattr(HFLM, "tok_encode", lambda *_: pytest.fail("a text was cut again"))
    tasks.measure(model, options, second)
    assert first == second


def test_nothing_holds_a_model_that_was_measured(bytes_material, tmp_path, monkeypatch):
    alive, plain = [], Tasks.measure

    def watched(self, model, *args):
        assert [earlier() for earlier in alive] == [None] * len(alive)
        alive.append(weakref.ref(model))
        return plain(self, model, *args)

    monkeypatch.setattr(Tasks, "measure", watched)
    lora = {"set": {"control": "lora", "upscale": HML["upscale"]}}
    methods = {"full": {}, "lora": lora}
    tasks = {"names": ["piqa", "gsm8k"], "limit": 2}
    study = tasks_study(bytes_material, tasks, methods=methods, final_seeds=[5])
    assert run_study(study, tmp_path).ran == 4
    assert len(alive) == 3
    scores = rows_of(tmp_path)[-1]["tasks"]
    assert {name: list(score) for name, score in scores.items()} == {
        "piqa": ["acc", "stderr", "n"],
        "gsm8k": ["exact_match", "stderr", "n"],
    }

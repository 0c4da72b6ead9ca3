"""Speeds that are filled in: once for trials alike, in every row, and never over another."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from small import HML, Ticks, fake_row, make_study, report_of
from tiny import save_base

from midus.errors import MidusError
from midus.studies.grid import search_trials
from midus.studies.loop import Loop
from midus.studies.material import Material
from midus.studies.report import make_report, to_markdown
from midus.studies.results import add_result, read_results
from midus.studies.run import run_study
from midus.studies.speeds import speed_cell
from midus.studies.step_cost import step_cost
from midus.studies.timed_apart import time_trials
from midus.studies.timing import Stopwatch

FULL = {"full": {}}
APART = {"steps": 10, "trial": "x", "hardware": "a GPU", "conditions": {"commit": "abc"}}


def rewrite(folder, change):
    """Every row of a folder's results as a function leaves it; the first one is the base's."""
    path = folder / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        change(number, row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_speed(number, row):
    if number:
        row["tokens_per_second"] = None


@pytest.fixture
def shared(finished, tmp_path):
    """The finished study as if its trials had shared a device: full and hml, two rates each."""
    out = tmp_path / "study"
    shutil.copytree(finished[1], out)
    rewrite(out, without_speed)
    return out


def rows_of(folder, method=None):
    """As they count, without the base's."""
    _, *rows = read_results(folder).values()
    return [row for row in rows if method in (None, row["method"])]


def speeds_of(folder):
    return [row["tokens_per_second"] for row in rows_of(folder)]


@pytest.fixture
def made(monkeypatch):
    """The options of every loop that is made."""
    found, plain = [], Loop.__init__

    def watched(self, model, options, sequences):
        found.append(options)
        plain(self, model, options, sequences)

    monkeypatch.setattr(Loop, "__init__", watched)
    return found


def cost(material, seed=0, run=None, **settings):
    """Of a trial of HML with such settings."""
    return cost_of(material, {**HML, **settings}, seed, run)


def cost_of(material, settings, seed=0, run=None, config=None):
    methods = {"any": {"set": settings}}
    study = make_study(material, methods=methods, search={}, seeds=[seed], run=run or {})
    return step_cost(
        search_trials(study)[0].options, config or SimpleNamespace(num_hidden_layers=4)
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 7},
        {"optimizer.lr": 0.5, "optimizer.memory_lr": 0.1, "optimizer.weight_decay": 0.1},
        {"optimizer.adam_beta2": 0.5, "trainer.adam_beta1": 0.5, "trainer.max_grad_norm": 3.0},
        {"optimizer.schedule": "linear", "optimizer.warmup_ratio": 0.3},
        {"optimizer.recipe": "paper", "optimizer.decay_ratio": 0.5},
        {"data.max_tokens": 1024},
        {"key_start": "queries"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_no_step_takes_longer_for_is_timed_once(material, settings):
    assert cost(material, **settings) == cost(material)


@pytest.mark.parametrize(
    "settings",
    [
        {"upscale.memory.num_subkeys": 16},
        {"upscale.memory.top_k": 2},
        {"upscale.num_inserted": 1},
        {"control": "lora"},
        {"trainable": "all"},
        {"batch_size": 8},
        {"data.seq_len": 32},
        {"precision": "mixed"},
        {"attention": "eager"},
        {"loss_chunk": 8},
        {"fused_blocks": False},
        {"cuda_graphs": False},
        {"trainer.per_device_train_batch_size": 4},
        {"trainer.optim": "sgd"},
        {"optimizer.parts.keys.lr": 0.1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_a_step_may_take_longer_for_is_timed_apart(material, settings):
    assert cost(material, **settings) != cost(material)


def copies(method, **more):
    return {"upscale": {"method": method, **more}}


def test_copied_blocks_cost_by_where_they_stand_and_not_by_what_they_start_from(material):
    def of(method, **more):
        return cost_of(material, copies(method, **more))

    assert of("avg_deus") == of("lesa") == of("opt_deus") != of("llama_pro")
    assert of("llama_pro") != of("llama_pro", num_inserted=1)
    # On other sides of their anchors, in the same places.
    assert of("llama_pro", positions=[2, 4]) == of("avg_deus", positions=[2, 4])
    # Every weight of these trains.
    assert of("solar") not in (of("llama_pro"), of("avg_deus"))
    # As many parameters as the blocks have, in adapters.
    lora = [cost_of(material, {"control": "lora", **copies(name)}) for name in ("lesa", "avg_deus")]
    assert len({*lora, of("lesa")}) == 3


def test_copies_of_blocks_that_look_at_a_window_cost_what_those_do(material):
    near, far = "sliding_attention", "full_attention"
    config = SimpleNamespace(num_hidden_layers=4, layer_types=[near, far, near, near])

    def of(method, position):
        settings = copies(method, positions=[position])
        return cost_of(material, settings, config=config)

    # Before its anchor or after it: of the same place, one copies the far-looking block.
    assert of("llama_pro", 2) != of("avg_deus", 2)
    assert of("llama_pro", 3) == of("avg_deus", 3)


def test_what_grows_quickly_is_timed_for_what_does_not(material, tmp_path, made):
    methods = {
        "lesa": {"set": {**copies("lesa"), "upscale.lesa_epochs": 1}},
        "avg": {"set": copies("avg_deus")},
    }
    run_study(make_study(material, methods=methods, search={}), tmp_path)
    rewrite(tmp_path, without_speed)
    made.clear()
    timed = time_trials(tmp_path, steps=1)
    assert (timed.trials, timed.timings) == (2, 1)
    assert [options.upscale.method for options in made] == ["avg_deus"]


def test_parts_cost_by_being_apart_and_not_by_their_numbers(material):
    one, other = ({"optimizer.parts.keys.lr": lr} for lr in (0.1, 0.2))
    clipped, more = ({"optimizer.parts.keys.max_grad_norm": norm} for norm in (1.0, 2.0))
    assert cost(material, **one) == cost(material, **other) != cost(material, **clipped)
    assert cost(material, **clipped) == cost(material, **more)


def test_every_row_gets_the_speed_of_steps_like_its_own(shared, made):
    said = []
    timed = time_trials(shared, steps=2, say=said.append)
    assert (timed.trials, timed.timings, timed.skipped) == (4, 2, [])
    assert [options.upscale is None for options in made] == [True, False]
    assert "1 of 2: full, lr=0.001, seed 0, for 1 more whose steps cost the same" in said
    full, hml = rows_of(shared, "full"), rows_of(shared, "hml")
    for rows in (full, hml):
        assert rows[0]["tokens_per_second"] == rows[1]["tokens_per_second"] > 0
        for row in rows:
            apart = row["timed_apart"]
            assert (apart["steps"], apart["trial"]) == (2, rows[0]["key"])
            assert apart["hardware"] == row["hardware"]
            assert apart["conditions"]["date"] >= row["conditions"]["date"]
    assert full[0]["tokens_per_second"] != hml[0]["tokens_per_second"]


def test_nothing_but_the_speed_changes(shared):
    before = read_results(shared)
    time_trials(shared, steps=1)
    after = read_results(shared)
    for key, row in before.items():
        new = ("tokens_per_second", "timed_apart")
        left = {name: value for name, value in after[key].items() if name not in new}
        assert left == {name: value for name, value in row.items() if name not in new}
        assert ("timed_apart" in after[key]) is (row["method"] != "untouched")


def test_three_steps_warm_up_and_the_others_are_timed(shared, monkeypatch):
    steps, plain = [], Loop.step
    monkeypatch.setattr(Loop, "step", lambda self: (steps.append(self.num_steps), plain(self)))
    clock = Ticks()
    monkeypatch.setattr(Stopwatch, "_now", lambda _: clock())
    time_trials(shared, steps=2, only=["hml"])
    assert speeds_of(shared)[2:] == [2 * 4 * 16] * 2  # two steps in a second
    # As many as the trial has, so that its rates rise no sooner.
    assert steps == [8] * 5
    rewrite(shared, without_speed)
    time_trials(shared, steps=9, only=["hml"])
    assert steps[5:] == [12] * 12


def test_studies_given_together_are_timed_once_where_their_steps_cost_the_same(
    midus, shared, tmp_path, made
):
    other = tmp_path / "other"
    shutil.copytree(shared, other)
    rewrite(other, lambda number, row: row.update(tokens_per_second=7.0) if number == 1 else None)
    told = midus("study", "time", shared, other, "--steps", 1)
    assert told.code == 0, told.err
    assert len(made) == 2
    assert "timed      2 times, for 7 trials" in told.out
    assert told.err.count("as timed for another study") == 2
    assert told.out.count("results.jsonl") == 2
    assert speeds_of(other) == [7.0, *speeds_of(shared)[1:]]
    apart = [row["timed_apart"] for row in rows_of(other)[1:]]
    assert apart == [row["timed_apart"] for row in rows_of(shared)[1:]]
    assert "nothing" in midus("study", "time", shared, other).out


def test_a_folder_that_is_no_study_is_refused_before_the_others_are_timed(
    midus, shared, tmp_path, made
):
    told = midus("study", "time", shared, tmp_path / "typo", "--steps", 1)
    assert (told.code, made) == (2, [])
    assert "holds no study" in told.err.replace("\n", " ")


def test_a_folder_in_use_keeps_no_other_from_being_timed(midus, shared, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(shared, other)
    with FileLock(shared / ".lock"):
        told = midus("study", "time", shared, other, "--steps", 1)
    assert told.code == 2
    assert "timed      2 times, for 4 trials" in told.out
    said = told.err.replace("\n", " ")
    assert "4 trials have their tokens/s and 1 timings could not be taken" in said
    assert "in use by another midus" in said
    assert None not in speeds_of(other)


def test_steps_of_another_base_are_timed_again(shared, material, tmp_path):
    save_base(tmp_path / "base", intermediate_size=40)
    wider = make_study({**material, "base": str(tmp_path / "base")}, methods=FULL)
    run_study(wider, tmp_path / "wider")
    rewrite(tmp_path / "wider", without_speed)
    speeds = {}
    time_trials(shared, steps=1, speeds=speeds)
    rewrite(shared, without_speed)
    assert time_trials(shared, steps=1, speeds=speeds).timings == 0
    assert time_trials(tmp_path / "wider", steps=1, speeds=speeds).timings == 1


def test_a_second_call_does_nothing_and_says_so(midus, shared, monkeypatch):
    first = midus("study", "time", shared, "--steps", 1)
    assert first.code == 0, first.err
    assert "timed      2 times, for 4 trials" in first.out
    assert "tokens/s" in first.err
    before = (shared / "results.jsonl").read_bytes()
    monkeypatch.setattr(Material, "__init__", lambda *_: pytest.fail("the base was loaded"))
    second = midus("study", "time", shared)
    assert second.code == 0, second.err
    assert "timed      nothing: no trial that is done is left to time" in second.out
    assert (shared / "results.jsonl").read_bytes() == before


def test_a_speed_that_is_there_is_never_replaced(shared, made):
    rewrite(shared, lambda number, row: row.update(tokens_per_second=7.0) if number < 4 else None)
    time_trials(shared, steps=1)
    assert len(made) == 1
    *there, filled = speeds_of(shared)
    assert there == [7.0] * 3 != [filled] * 3
    # Nor by a line that a call on another machine has added.
    row = rows_of(shared)[0]
    add_result(shared, {**row, "tokens_per_second": 8.0, "timed_apart": APART, "graphed": True})
    kept = rows_of(shared)[0]
    assert (kept["tokens_per_second"], kept["graphed"]) == (7.0, False)
    assert "timed_apart" not in kept


def test_a_speed_comes_with_what_it_was_measured_of(tmp_path, material):
    """A trial that runs again shares its device again, or has it alone."""
    study = make_study(material)
    trial = search_trials(study)[0]
    for rate, graphed in ((None, False), (None, True), (5.0, True), (6.0, False)):
        extra = {"tokens_per_second": rate, "graphed": graphed}
        add_result(tmp_path, fake_row(study, trial, (2.0, 2.0), **extra))
        (row,) = read_results(tmp_path).values()
        wanted = (5.0, True) if rate else (None, False)
        assert (row["tokens_per_second"], row["graphed"]) == wanted


def test_a_later_line_of_tasks_or_models_is_not_taken_back(shared):
    """What a row had when it was read must not count over what others have written since."""
    rewrite(shared, lambda number, row: row.update(model="old", tasks_of="old"))
    time_trials(shared, steps=1, only=["full"])
    lines = [json.loads(line) for line in (shared / "results.jsonl").read_text().splitlines()]
    assert [("model" in line, "tasks_of" in line) for line in lines[5:]] == [(False, False)] * 2


def test_trials_that_are_not_done_are_left(shared, made):
    rewrite(shared, lambda number, row: row.update(status="diverged") if number > 1 else None)
    assert time_trials(shared, steps=1).trials == 1
    assert len(made) == 1


def test_some_methods_alone_are_timed(midus, shared):
    told = midus("study", "time", shared, "--steps", 1, "--only", "hml")
    assert "timed      1 times, for 2 trials" in told.out
    assert [speed is None for speed in speeds_of(shared)] == [True, True, False, False]


def test_a_timing_without_memory_is_said_and_the_others_go_on(midus, shared, monkeypatch):
    plain = Loop.step

    def step(self, *args):
        if self.options.upscale is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(self, *args)

    monkeypatch.setattr(Loop, "step", step)
    told = midus("study", "time", shared, "--steps", 1)
    assert told.code == 2
    assert "  skipped: memory does not hold it; free the device, or take another" in told.err
    assert "timed      1 times, for 2 trials" in told.out
    assert [speed is None for speed in speeds_of(shared)] == [True, True, False, False]


def test_trials_of_other_material_or_options_that_are_no_more_are_left_and_said(shared, made):
    said = []
    rewrite(shared, lambda number, row: row.update(identity="other") if number < 3 else None)
    rewrite(shared, lambda number, row: row["options"].update(gone=1) if number == 3 else None)
    assert time_trials(shared, steps=1, say=said.append).trials == 1
    assert len(made) == 1
    assert "2 trials are of another base, other tokens or other texts, and are left out" in said
    assert any("hml, lr=0.001, seed 0: left out, as its options" in sentence for sentence in said)


def test_another_base_than_the_folders_is_refused(midus, shared, tmp_path, material):
    other = tmp_path / "base"
    shutil.copytree(material["base"], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    values = json.loads((shared / "study.json").read_text())
    values["study"]["run"]["model"] = str(other)
    (shared / "study.json").write_text(json.dumps(values))
    told = midus("study", "time", shared)
    assert told.code == 2
    assert "was begun with another base, other tokens or other texts" in told.err.replace("\n", " ")
    assert speeds_of(shared) == [None] * 4


def test_a_study_that_changed_meanwhile_stays_as_it_is(shared, monkeypatch):
    path, made = shared / "study.json", Material.__init__
    values = json.loads(path.read_text())
    values["study"]["seeds"] = [0, 5]

    def changed(self, *args):
        made(self, *args)
        path.write_text(json.dumps(values))  # as a study run that ends before the lock is taken

    monkeypatch.setattr(Material, "__init__", changed)
    time_trials(shared, steps=1, only=["full"])
    assert json.loads(path.read_text())["study"]["seeds"] == [0, 5]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", 0], "steps=0 must be a positive whole number"),
        (["--only", "nobody"], "the study has no method 'nobody'; choose from full, hml"),
        (["--only", ","], "only=',' names nothing; give one or more, or leave it out"),
        (["elsewhere", "--only", "hml"], "only='hml' names methods of one study, and there are 2"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(midus, shared, arguments, sentence):
    told = midus("study", "time", shared, *arguments)
    assert told.code == 2
    assert sentence in told.err.replace("\n", " ")
    assert "Traceback" not in told.err


def test_what_is_no_study_is_refused(midus, tmp_path):
    told = midus("study", "time", tmp_path)
    assert told.code == 2
    assert "holds no study" in told.err.replace("\n", " ")


def test_a_folder_in_use_is_refused(shared):
    with FileLock(shared / ".lock"), pytest.raises(MidusError, match="in use by another midus"):
        time_trials(shared)


def test_the_report_shows_the_speed_and_says_where_it_is_from(shared):
    assert "timed apart" not in to_markdown(make_report(shared), [])
    time_trials(shared, steps=2, only=["hml"])
    rewrite(shared, lambda number, row: row.update(tokens_per_second=7.0) if number == 1 else None)
    text = to_markdown(make_report(shared), [])
    speed = rows_of(shared, "hml")[0]["tokens_per_second"]
    assert text.count(f"| {speed:,.0f} † | - |") == 3
    sentence = "Tokens/s of 2 of 3 trials were timed apart from them, over 2 steps on a free device"
    assert text.count(sentence) == 1
    assert text.index("| hml |") < text.index(sentence) < text.index("## Every trial")


def test_one_timing_of_several_seeds_has_no_spread(tmp_path, material):
    extra = {"tokens_per_second": 1234.0}
    study = {"methods": FULL, "search": {}, "seeds": [0, 1]}
    figures = [(1.0, 1.0)] * 2
    report = report_of(tmp_path / "own", material, figures, extra=extra, **study)
    assert "| 1,234 ± 0 | - |" in to_markdown(report, [])
    extra["timed_apart"] = APART
    report = report_of(tmp_path / "apart", material, figures, extra=extra, **study)
    text = to_markdown(report, [])
    assert "± 0 |" not in text.replace("± 0.000", "")
    assert text.count("| 1,234 | - |") == 3
    sentence = "of 2 of 2 trials were timed apart from them, over 10 steps on a free device (a GPU;"
    assert f"{sentence} commit abc), once for all" in text


def test_a_trials_own_speed_and_one_timed_of_it_for_another_are_two_figures():
    own = {"key": "a", "tokens_per_second": 7.0}
    apart = {"key": "b", "tokens_per_second": 100.0, "timed_apart": {**APART, "trial": "a"}}
    assert speed_cell([own, apart]) == speed_cell([apart, own])
    assert speed_cell([own, apart]).startswith("54 ± ")


def test_rows_without_a_speed_have_none_in_the_report(shared):
    text = to_markdown(make_report(shared), [])
    assert text.count("| - | - | done |") == 4

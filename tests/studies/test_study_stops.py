"""Stops, kills and failing disks: no bit changes, and no training that has ended is lost."""

import shutil
from contextlib import suppress

import pytest
import torch
from filelock import FileLock
from small import HML, Ticks, make_study, rows_of
from small_sft import LORA

from midus.errors import MidusError
from midus.evaluation.perplexity import perplexity
from midus.models.loading import load_model
from midus.studies import trial as trial_module
from midus.studies import unfinished
from midus.studies.grid import search_trials
from midus.studies.loop import Loop
from midus.studies.material import Material
from midus.studies.run import run_study
from midus.studies.timing import Deadline, Pace
from midus.studies.unfinished import load_unfinished, save_unfinished

KEPT = {"methods": {"full": {"keep": True}}, "search": {}, "final_seeds": [0]}


def facts_of(out):
    (path,) = out.glob("unfinished/*/facts.json")
    return path


@pytest.fixture(scope="module")
def make_loop(material):
    """Loops with dropout and with statistics in buffers: all that a stop could lose."""
    memory = {"num_subkeys": 8, "query_norm": "batch"}
    methods = {"hml": {"set": {"upscale": {"memory": memory}}}}
    (trial,) = search_trials(make_study(material, methods=methods, search={}))
    shared = Material(material["base"], material["tokens"], {})
    data = shared.sequences("train", 16, 512)

    def make():
        model = shared.start(trial.options)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        return Loop(model, trial.options, data)

    return make


def state_of(loop):
    return {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}


def assert_equal(left, right):
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def steps(loop, num):
    for _ in range(num):
        loop.step()
    return state_of(loop)


def test_a_study_that_is_stopped_in_the_middle_ends_with_the_same_bits(finished, tmp_path):
    study, out, _ = finished
    calls = 0
    while True:
        progress = run_study(study, tmp_path, deadline=Deadline(17, Ticks()))
        calls += 1
        if not progress.is_out_of_time:
            break
        assert progress.left > 0
        assert facts_of(tmp_path)
    assert calls == 3
    assert rows_of(tmp_path) == rows_of(out)
    assert not (tmp_path / "unfinished").exists()


def test_two_stopped_trials_both_go_on(finished, tmp_path):
    study, out, _ = finished
    for method in ("full", "hml"):
        stopped = run_study(study, tmp_path, only=[method], deadline=Deadline(4, Ticks()))
        assert stopped.is_out_of_time
    assert len(list(tmp_path.glob("unfinished/*/facts.json"))) == 2
    assert run_study(study, tmp_path).ran == 4
    assert not (tmp_path / "unfinished").exists()
    assert sorted(rows_of(tmp_path), key=str) == sorted(rows_of(out), key=str)


def test_a_loop_is_random_by_its_seed_alone(make_loop):
    torch.manual_seed(1)
    first = steps(make_loop(), 3)
    torch.manual_seed(2)
    assert_equal(steps(make_loop(), 3), first)


def test_a_stopped_loop_goes_on_with_the_same_bits_and_chances(make_loop, tmp_path):
    loop = make_loop()
    steps(loop, 3)
    save_unfinished(tmp_path, "k", loop, {"curve": [1]})
    wanted = steps(loop, 3)
    again = make_loop()
    facts = load_unfinished(tmp_path, "k", again, pytest.fail)
    assert (facts["curve"], again.done) == ([1], 3)
    assert_equal(steps(again, 3), wanted)


@pytest.mark.parametrize("name", ["facts.json", "weights.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "half"])
def test_what_is_not_whole_is_removed_and_the_trial_begins_anew(make_loop, tmp_path, name, damage):
    loop = make_loop()
    steps(loop, 2)
    save_unfinished(tmp_path, "k", loop, {})
    path = tmp_path / "unfinished" / "k" / name
    whole = path.read_bytes()
    path.unlink()
    if damage == "half":
        path.write_bytes(whole[: len(whole) // 2])
    fresh, said = make_loop(), []
    before = state_of(fresh)
    assert load_unfinished(tmp_path, "k", fresh, said.append) is None
    assert (fresh.done, len(said), path.parent.exists()) == (0, 1, False)
    assert_equal(state_of(fresh), before)


def kill_while_removing(folder, **_):
    if folder.exists():
        (folder / "facts.json").unlink()
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (unfinished, "_put_in_place", lambda *_: None),
        (unfinished.shutil, "rmtree", kill_while_removing),
        (unfinished.shutil, "rmtree", lambda *_, **__: None),
    ],
    ids=["killed before it took its place", "killed while removing", "nothing can be removed"],
)
def test_a_save_that_goes_wrong_loses_nothing(
    make_loop, tmp_path, monkeypatch, place, name, instead
):
    loop = make_loop()
    steps(loop, 2)
    save_unfinished(tmp_path, "k", loop, {})
    steps(loop, 1)
    monkeypatch.setattr(place, name, instead)
    with suppress(KeyboardInterrupt):
        save_unfinished(tmp_path, "k", loop, {})
    monkeypatch.undo()
    again = make_loop()
    assert load_unfinished(tmp_path, "k", again, pytest.fail)["done"] == 3
    assert_equal(state_of(again), state_of(loop))
    save_unfinished(tmp_path, "k", again, {})
    assert facts_of(tmp_path).parent.name == "k"


def test_a_state_stays_until_its_row_is_written(material, tmp_path, monkeypatch):
    study = make_study(material, methods={"full": {}}, search={})
    assert run_study(study, tmp_path, deadline=Deadline(4, Ticks())).is_out_of_time
    monkeypatch.setattr(trial_module, "add_result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path)
    assert facts_of(tmp_path).is_file()


def interrupt(*_, **__):
    raise KeyboardInterrupt


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


def test_finalists_are_chosen_on_validation_and_their_models_kept(material, tmp_path):
    methods = {"hml": {"set": HML, "keep": True}}
    study = make_study(material, methods=methods, final_seeds=[0])
    progress = run_study(study, tmp_path)
    assert progress.ran == 3  # the search's best again, to keep it
    rows = rows_of(tmp_path)[1:]
    best = min(rows[:2], key=lambda row: row["validation"]["loss"])
    assert [(r["setting"], r["seed"]) for r in rows[2:]] == [(best["setting"], 0)] * 2
    assert run_study(study, tmp_path).ran == 0
    kept = tmp_path / rows[3]["model"]
    assert (kept / "delta.safetensors").is_file()
    shared = Material(material["base"], material["tokens"], {})
    ids = shared.sequences("test", 16).flatten().long()
    read = perplexity(load_model(kept), ids, window=16).perplexity
    assert read == pytest.approx(rows[2]["test"]["perplexity"], rel=1e-5)


def test_adapters_that_a_kill_left_without_their_line_are_written_again(
    material, tmp_path, monkeypatch
):
    study = make_study(material, **KEPT | {"methods": {"lora": {"set": LORA, "keep": True}}})
    plain = trial_module.add_result
    killed = lambda out, row: interrupt() if "model" in row else plain(out, row)  # noqa: E731
    monkeypatch.setattr(trial_module, "add_result", killed)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path)
    monkeypatch.undo()
    (kept,) = (tmp_path / "models").iterdir()
    assert (kept / "adapter_model.safetensors").is_file()
    assert [run_study(study, tmp_path).ran for _ in range(2)] == [1, 0]
    assert rows_of(tmp_path)[-1]["model"] == f"models/{kept.name}"


def test_a_model_that_cannot_be_written_costs_no_row(material, tmp_path, monkeypatch):
    study, said = make_study(material, **KEPT), []
    monkeypatch.setattr(trial_module, "write_weights", full_disk)
    run_study(study, tmp_path, say=said.append)
    assert [row["status"] for row in rows_of(tmp_path)] == ["done"] * 2
    assert sum("the model is not kept (" in sentence for sentence in said) == 1
    monkeypatch.undo()
    assert run_study(study, tmp_path).ran == 1
    assert (tmp_path / rows_of(tmp_path)[-1]["model"]).is_dir()
    assert run_study(study, tmp_path).ran == 0


def test_a_kill_while_a_model_is_kept_costs_no_row(material, tmp_path, monkeypatch):
    study = make_study(material, **{**KEPT, "final_seeds": [1]})
    monkeypatch.setattr(trial_module, "write_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path)
    assert [row["seed"] for row in rows_of(tmp_path)[1:]] == [0, 1]


def test_a_tokenizer_that_is_missing_is_told_before_the_first_trial(
    material, tmp_path, monkeypatch
):
    base = tmp_path / "base"
    shutil.copytree(material["base"], base, ignore=shutil.ignore_patterns("token*"))
    monkeypatch.setattr(Loop, "step", lambda *_: pytest.fail("a step was made"))
    with pytest.raises(MidusError, match="tokenizer"):
        run_study(make_study({**material, "base": str(base)}, **KEPT), tmp_path / "out")


def test_a_folder_in_use_is_refused(material, tmp_path):
    study = make_study(material, methods={"full": {}}, search={})
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(MidusError, match="in use by another midus study command"),
    ):
        run_study(study, tmp_path)
    assert run_study(study, tmp_path).ran == 1


def test_with_a_limit_each_step_waits_for_the_one_before():
    log = []

    class Event:
        def __init__(self):
            self.number = sum(kind == "record" for kind, _ in log)

        def record(self):
            log.append(("record", self.number))

        def synchronize(self):
            log.append(("wait", self.number))

    pace, free = Pace(True, Event), Pace(False, Event)
    for _ in range(3):
        pace.step()
        free.step()
    assert log == [("record", 0), ("record", 1), ("wait", 0), ("record", 2), ("wait", 1)]
    assert (Deadline(3).has_limit, Deadline(None).has_limit) == (True, False)

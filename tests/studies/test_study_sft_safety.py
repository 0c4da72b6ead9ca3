"""What a fine-tuning of finalists never loses, and when it stops."""

import errno
import json
import os
import stat
from collections import namedtuple

import pytest
from small import HML, Ticks, make_study
from small_sft import FakeTasks, rows_of

from midus import load_model
from midus.errors import MidusError
from midus.models import atomic
from midus.studies import sft as sft_module
from midus.studies import sft_run
from midus.studies.results import NotWritten, add_result
from midus.studies.run import run_study
from midus.studies.sft import run_sft
from midus.studies.sft_report import make_sft_report, to_markdown
from midus.studies.timing import Deadline

SHORT = ["trainer.max_steps=1"]
HML_100 = {"only": ["hml"], "seeds": [100]}


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_a_kept_model_outlives_the_choice_of_another_setting(material, config, tmp_path):
    some = {"methods": {"full": {"keep": True}}, "final_seeds": [100], "curve_points": 1}
    rates = [1e-6], [1e-6, 1e-2]
    for values in rates:
        study = make_study(material, search={"optimizer.lr": values}, **some)
        run_study(study, tmp_path)
        run_sft(tmp_path, config, settings=SHORT, only=["full"], keep=True)
    first, second = rows_of(tmp_path)
    assert first["trial"] != second["trial"]
    assert first["model"] != second["model"]
    for row in (first, second):
        load_model(tmp_path / row["model"])
    assert "1 rows are of models that the study has chosen no longer" in to_markdown(
        make_sft_report(tmp_path, "words")
    )


def test_a_model_that_any_row_names_is_not_removed(copied, config):
    run_sft(copied, config, settings=SHORT, keep=True, **HML_100)
    (row,) = rows_of(copied)
    results = copied / "sft" / "words" / "results.jsonl"
    before = sorted(p.name for p in (copied / row["model"]).iterdir())
    # A row without a model comes first, as where lines of two machines are put together.
    own = {name: value for name, value in row.items() if name != "model"}
    results.write_text(f"{json.dumps(own)}\n{json.dumps(row)}\n")
    assert run_sft(copied, config, settings=SHORT, **HML_100).ran == 0
    assert sorted(p.name for p in (copied / row["model"]).iterdir()) == before
    # The run's own row is gone, and another names its folder.
    results.write_text(json.dumps({**row, "key": "of another"}) + "\n")
    progress = run_sft(copied, config, settings=SHORT, **HML_100)
    assert "is the kept model of another row" in progress.skipped[0]
    assert sorted(p.name for p in (copied / row["model"]).iterdir()) == before


def test_no_method_has_the_name_of_the_base(material):
    with pytest.raises(MidusError, match=r"methods\.untouched has the name .* call it otherwise"):
        make_study(material, methods={"untouched": {}, "hml": {"set": HML}})


def test_options_may_change_until_something_has_been_trained(copied, config):
    other = [*SHORT, "optimizer.lr=1e-2"]
    run_sft(copied, config, deadline=Deadline(0))
    facts = copied / "sft" / "words" / "sft.json"
    assert json.loads(facts.read_text())["options"]["optimizer"]["lr"] == 1e-3
    run_sft(copied, config, settings=["optimizer.lr=1e-2"], deadline=Deadline(4, Ticks()))
    assert json.loads(facts.read_text())["options"]["optimizer"]["lr"] == 1e-2
    # There are steps that other options would throw away.
    assert list(facts.parent.glob("*/checkpoint-*"))
    assert not rows_of(copied)
    with pytest.raises(MidusError, match=r"begun with trainer.max_steps=5 and not 1, .*--name"):
        run_sft(copied, config, settings=other)


def test_a_delta_is_fine_tuned_from_the_base_as_the_study_has_it(copied, config):
    run_sft(copied, config, settings=SHORT, name="before", **HML_100)
    (wanted,) = rows_of(copied, "before")
    for path in (copied / "models").glob("*/config.json"):
        if "base_model" in path.read_text():
            edit_json(path, lambda values: values["base_model"].update(id="/of/then/base"))
    assert run_sft(copied, config, settings=SHORT, **HML_100).skipped == []
    (row,) = rows_of(copied)
    for name in ("held_out", "test", "texts", "trainable", "parameters", "tokens"):
        assert row[name] == wanted[name]
    assert not list((copied / "sft").rglob("*.safetensors"))


def test_a_delta_of_another_base_is_not_fine_tuned(copied, config):
    for path in (copied / "models").glob("*/config.json"):
        if "base_model" in path.read_text():
            other = {"id": "/of/then/base", "fingerprint": "0" * 64}
            edit_json(path, lambda values, other=other: values["base_model"].update(other))
    progress = run_sft(copied, config, settings=SHORT, **HML_100)
    assert "is not the base of this model" in progress.skipped[0]


@pytest.mark.parametrize("place", ["checkpoint", "small file"])
def test_a_full_disk_stops_the_command(midus, copied, config, monkeypatch, place):
    if place == "checkpoint":
        usage = namedtuple("usage", "total used free")(1, 1, 0)
        monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage)
    else:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(sft_run, "write_json", full)
    began = []
    with pytest.raises(NotWritten, match="disk is full; free some space and run the same command"):
        run_sft(copied, config, settings=SHORT, say=began.append)
    assert [line for line in began if " of 7: " in line] == ["1 of 7: the base"]
    told = midus("study", "sft", copied, config, "--set=trainer.max_steps=1")
    assert told.code == 2
    assert "run the same command again" in told.err.replace("\n", " ")


def test_texts_are_read_once_where_tasks_take_several_calls(copied, config, monkeypatch):
    some = {"only": ["full"], "seeds": [100], "settings": SHORT}
    run_sft(copied, config, name="at_once", **some)
    edit_json(copied / "study.json", lambda v: v["study"].update(tasks={"names": ["piqa"]}))
    monkeypatch.setattr(sft_module, "Tasks", FakeTasks)
    monkeypatch.setattr(FakeTasks, "ran", [])
    # Asked before the run and before the first task.
    assert run_sft(copied, config, deadline=Deadline(2, Ticks()), **some).left == 1
    assert FakeTasks.ran == []
    for name in ("mean_loss", "score_text"):
        monkeypatch.setattr(sft_module, name, lambda *_: pytest.fail("a text was read again"))
    assert run_sft(copied, config, **some).ran == 1
    (row,), (wanted,) = rows_of(copied), rows_of(copied, "at_once")
    for name in ("test", "texts", "parameters"):
        assert row[name] == wanted[name]


def test_two_methods_of_one_label_are_both_left(copied, config):
    def alike(values):
        for name in ("full", "hml"):
            values["study"]["methods"][name]["label"] = "alike"

    edit_json(copied / "study.json", alike)
    run_sft(copied, config, settings=SHORT, only=["untouched"])
    report = make_sft_report(copied, "words")
    assert report.missing == [("alike", 2), ("alike", 2), ("lora", 2)]
    assert to_markdown(report).count("- alike: 2 of the models") == 2


def test_the_first_row_is_synced_with_its_folder(tmp_path, monkeypatch):
    plain, synced = os.fsync, []

    def fsync(handle):
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        plain(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    add_result(tmp_path, {"key": "a"})
    assert synced == [False, True]
    add_result(tmp_path, {"key": "b"})
    assert synced == [False, True, False]

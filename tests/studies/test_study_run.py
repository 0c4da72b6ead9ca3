"""Whole studies: what a row says, nothing runs twice, and no trial takes the others with it."""

import json
from pathlib import Path

import pytest
import torch
from small import CHANGING, HML, make_study, rows_of

from midus.errors import MidusError
from midus.studies import trial as trial_module
from midus.studies.loop import Loop
from midus.studies.material import Material
from midus.studies.options import StudyOptions
from midus.studies.report import make_report
from midus.studies.results import add_result, read_results
from midus.studies.run import lacks, run_study


def test_a_row_says_what_was_done_and_what_came_of_it(finished):
    _, out, _ = finished
    base, *rows = rows_of(out)
    assert (base["method"], base["trainable"]) == ("untouched", 0)
    assert [(r["method"], r["setting"]) for r in rows] == [
        (method, f"lr={lr}") for method in ("full", "hml") for lr in ("0.001", "0.01")
    ]
    for row in rows:
        assert (row["status"], row["steps"], row["tokens"]) == ("done", 8, 512)
        assert [point["tokens"] for point in row["curve"]] == [128, 256, 512]
        assert row["curve"][-1]["validation_loss"] == pytest.approx(row["validation"]["loss"])
        assert row["validation"]["loss"] < base["validation"]["loss"]
        assert row["test"]["perplexity"] != row["validation"]["perplexity"]
        assert row["rates"]["decay"] == row["options"]["optimizer"]["lr"]
    hml = rows[-1]
    assert set(hml["curve"][0]["grad_norms"]) >= {"keys", "values", "value_proj", "attention"}
    assert len(hml["measures"]["slots"]) == len(hml["measures"]["value_ranks"]) == 2
    assert rows[0]["measures"] == {}
    turned = hml["measures"]["gates"]
    assert list(turned) == ["0.95", "0.9", "0.8"]
    # The further down, the nearer to the base.
    losses = [hml["validation"]["loss"], *(read["validation"]["loss"] for read in turned.values())]
    distances = [abs(loss - base["validation"]["loss"]) for loss in losses]
    assert distances == sorted(set(distances), reverse=True)
    assert turned["0.9"]["test"] != hml["test"]
    assert list(turned["0.9"]["texts"]) == list(hml["texts"])


def test_that_steps_are_no_graphs_is_in_every_row_and_said_once(finished):
    _, out, said = finished
    assert [row["graphed"] for row in rows_of(out)[1:]] == [False] * 4
    assert sum("no CUDA graphs: the model is on cpu" in sentence for sentence in said) == 1


def test_trials_of_one_seed_begin_alike_and_share_no_weights(finished):
    """Equal data and start: before the second step nothing but the method can differ."""
    _, out, _ = finished
    full = [row["curve"][0]["train_loss"] for row in rows_of(out) if row["method"] == "full"]
    # Two steps at the two smallest rates of the warm-up; the first is at rate 0.
    assert full[0] == pytest.approx(full[1], rel=1e-6)


def test_what_has_ended_is_not_run_again(finished, monkeypatch):
    study, out, _ = finished
    before = (out / "results.jsonl").read_bytes()
    monkeypatch.setattr(Loop, "step", lambda *_: pytest.fail("a step was made"))
    assert run_study(study, out).ran == 0
    assert (out / "results.jsonl").read_bytes() == before


def test_a_line_cut_short_is_run_again_and_gives_the_same(finished, tmp_path):
    study, out, _ = finished
    lines = (out / "results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "study.json").write_bytes((out / "study.json").read_bytes())
    (tmp_path / "results.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:50])
    assert run_study(study, tmp_path).ran == 1
    rows = list(read_results(tmp_path).values())
    assert [row["method"] for row in rows] == ["untouched", "full", "full", "hml", "hml"]
    again = {k: v for k, v in rows[-1].items() if k not in CHANGING}
    assert again == rows_of(out)[-1]


def test_a_row_counts_for_options_that_were_added_since(finished, tmp_path):
    _, out, _ = finished
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()][1:]
    for row in rows:
        del row["options"]["key_start"], row["options"]["optimizer"]["decay_ratio"]
        add_result(tmp_path, {**row, "key": "as it was"})
    assert set(read_results(tmp_path)) == {row["key"] for row in rows}


def test_a_loss_that_is_no_number_ends_the_trial_and_not_the_study(material, tmp_path, monkeypatch):
    plain = Loop.step

    def broken(self, *args):
        plain(self, *args)
        if self.options.optimizer.lr == 1e-2 and self.done == 3:
            self.loss.fill_(float("nan"))

    monkeypatch.setattr(Loop, "step", broken)
    study = make_study(material, methods={"full": {}})
    assert run_study(study, tmp_path).ran == 2
    good, bad = rows_of(tmp_path)[1:]
    assert (good["status"], bad["status"], bad["step"]) == ("done", "diverged", 4)
    assert [point["step"] for point in bad["curve"]] == [2]


def test_a_trial_without_memory_enough_ends_alone(material, tmp_path, monkeypatch):
    plain = Loop.step

    def step(self, *args):
        if self.options.optimizer.lr == 1e-3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(self, *args)

    monkeypatch.setattr(Loop, "step", step)
    assert run_study(make_study(material, methods={"full": {}}), tmp_path).ran == 2
    assert [row["status"] for row in rows_of(tmp_path)] == ["done", "out_of_memory", "done"]


def test_a_model_without_a_test_loss_is_not_done_be_it_the_base(material, tmp_path, monkeypatch):
    splits, sequences, mean_loss = [], Material.sequences, trial_module.mean_loss

    def watched(self, split, *args):
        splits.append(split)
        return sequences(self, split, *args)

    monkeypatch.setattr(Material, "sequences", watched)
    monkeypatch.setattr(
        trial_module,
        "mean_loss",
        lambda *a: float("nan") if splits[-1] == "test" else mean_loss(*a),
    )
    run_study(make_study(material, methods={"full": {}}, search={}), tmp_path)
    assert [row["status"] for row in rows_of(tmp_path)] == ["diverged", "diverged"]
    report = make_report(tmp_path)
    assert (report.lines, report.missing) == ([], {"full": "every trial failed"})


def test_the_base_is_read_where_only_inserted_blocks_train(material, tmp_path):
    methods = {"hml": {"set": {**HML, "trainable": "inserted"}}}
    run_study(make_study(material, methods=methods, search={}), tmp_path)
    assert [row["status"] for row in rows_of(tmp_path)] == ["done", "done"]


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({}, []),
        ({"measure": ["slots", "rank"]}, ["slots"]),
        ({"curve_points": 2}, []),
        ({"curve_points": 4}, ["points of the curve"]),
    ],
)
def test_what_is_asked_for_after_a_trial_has_ended_is_known_to_lack(material, changed, missing):
    study = make_study(material, **changed)
    scores = {"validation": {"loss": 1.0}, "test": {"loss": 1.0}}
    row = {"status": "done", **scores, "steps": 8, "measured": ["rank"]}
    assert lacks({**row, "curve": [{"step": step} for step in (2, 4, 8)]}, study) == missing


def test_rows_that_lack_something_are_counted_aloud(finished, tmp_path):
    study, out, _ = finished
    (tmp_path / "results.jsonl").write_bytes((out / "results.jsonl").read_bytes())
    said = []
    more = StudyOptions.from_dict({**study.to_dict(), "curve_points": 4})
    assert run_study(more, tmp_path, say=said.append).ran == 0
    (sentence,) = said
    assert sentence.startswith("4 of 4 trials ended without points of the curve; remove")


def test_a_trial_that_cannot_run_here_is_left_for_later_and_the_others_run(
    material, tmp_path, monkeypatch
):
    plain = Material.start

    def start(self, options, *args):
        if options.upscale:
            raise MidusError("a package is missing")
        return plain(self, options, *args)

    study = make_study(material, methods={"hml": {"set": HML}, "full": {}}, search={})
    monkeypatch.setattr(Material, "start", start)
    with pytest.raises(MidusError, match=r"1 trials ran and 1 could not; .* a package is missing"):
        run_study(study, tmp_path)
    assert [row["method"] for row in rows_of(tmp_path)] == ["untouched", "full"]
    monkeypatch.undo()
    assert run_study(study, tmp_path).ran == 1


def test_other_tokens_are_refused_in_a_begun_folder(finished, material, tmp_path):
    _, out, _ = finished
    study = make_study(material, texts={"other": material["text"]})
    with pytest.raises(MidusError, match="begun with another base, other tokens or other texts"):
        run_study(study, out)
    with pytest.raises(MidusError, match="must be one token folder"):
        run_study(make_study({**material, "tokens": material["base"]}), tmp_path)


def test_the_command_runs_the_tiny_grid_and_reports_it(midus, material, tmp_path):
    grid = Path(__file__).parents[2] / "studies" / "tiny.yaml"
    sets = [f"--set=run.model={material['base']}", f"--set=run.data.sources={material['tokens']}"]
    sets += ["--set=final_seeds=[1]", "--set=run.data.max_tokens=256"]
    plan = midus("study", "run", grid, "--out", tmp_path, "--dry-run", *sets)
    assert "trials     8, then 4 with the final seeds" in plan.out
    first = midus("study", "run", grid, "--out", tmp_path, "--only", "hml", *sets)
    assert first.code == 0, first.err
    assert "ran        3 trials" in first.out
    rest = midus("study", "run", grid, "--out", tmp_path, "--time-limit", "0", *sets)
    assert "stopped    time is up, 6 or more are left" in rest.out
    told = midus("study", "report", tmp_path)
    assert told.code == 0, told.err
    assert "| MIDUS-HML |" in told.out
    assert "- lora: 2 trials are left." in told.out
    assert {p.name for p in tmp_path.glob("*.png")} == {"curves.png", "parameters.png"}
    assert "## Every trial of the search" in (tmp_path / "report.md").read_text()
    for nothing in ("", ","):
        bad = midus("study", "run", grid, "--out", tmp_path, "--only", nothing, *sets)
        assert bad.code == 2
        assert f"only={nothing!r} names nothing; give one or more, or leave it out" in bad.err
    bad = midus("study", "run", grid, "--out", tmp_path, "--only", "nobody", *sets)
    assert bad.code == 2
    assert "the study has no method 'nobody'" in bad.err
    assert midus("study", "report", tmp_path / "nothing").code == 2

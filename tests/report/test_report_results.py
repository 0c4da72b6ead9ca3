"""Which results belong to which model."""

import json
import shutil

import pytest
from pages import evaluation, heads, make_run, slots, theorem, write_json

from midus.errors import MidusError
from midus.report import collect
from midus.report.collect import labels


def kinds(subject):
    return sorted(result.kind for result in subject.results)


def test_results_are_found_under_the_target_in_analysis_and_where_told(stored, grown_id, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(stored / "run", run, symlinks=True)
    write_json(run / "any" / "where" / "heads.json", heads("elsewhere", grown_id))
    write_json(tmp_path / "analysis" / "x" / "slots.json", slots("elsewhere", grown_id))
    told = write_json(tmp_path / "told.json", evaluation([("m", grown_id, 0.5, 0.5, 9.0)]))
    (subject,) = collect([str(run)], [told]).subjects
    assert kinds(subject) == ["eval", "heads", "slots"]


def test_results_of_other_models_are_ignored(stored, grown_id, tmp_path):
    write_json(tmp_path / "analysis" / "a" / "heads.json", heads("other", "f" * 12))
    write_json(tmp_path / "analysis" / "b" / "heads.json", heads("same", grown_id))
    found = collect([str(stored / "grown")])
    assert [r.values["model"] for r in found.subjects[0].results] == ["same"]
    assert [r.values["model"] for r in found.ignored] == ["other"]


def test_a_result_without_an_id_goes_by_its_path(stored, tmp_path):
    place = str(stored / "grown")
    write_json(tmp_path / "analysis" / "a" / "heads.json", heads(place, None))
    write_json(tmp_path / "analysis" / "b" / "slots.json", slots(str(stored / "base"), None))
    found = collect([place])
    assert kinds(found.subjects[0]) == ["heads"]
    assert [r.kind for r in found.ignored] == ["slots"]


def test_the_same_place_with_other_weights_is_another_model(stored, tmp_path):
    place = str(stored / "grown")
    write_json(tmp_path / "analysis" / "heads.json", heads(place, "f" * 12))
    found = collect([place])
    assert kinds(found.subjects[0]) == []
    assert len(found.ignored) == 1


def test_an_evaluation_belongs_to_every_model_in_its_rows(stored, grown_id, tmp_path):
    rows = [("base", "f" * 12, 0.5, 0.5, 9.0), ("grown", grown_id, 0.6, 0.5, 8.0)]
    write_json(tmp_path / "analysis" / "eval.json", evaluation(rows))
    assert kinds(collect([str(stored / "grown")]).subjects[0]) == ["eval"]


def test_a_copy_of_a_result_is_shown_once(stored, grown_id, tmp_path):
    for folder in ("a", "b"):
        write_json(tmp_path / "analysis" / folder / "heads.json", heads("m", grown_id))
    assert kinds(collect([str(stored / "grown")]).subjects[0]) == ["heads"]


def test_the_theorem_without_a_model_belongs_to_every_report(stored, tmp_path):
    write_json(tmp_path / "analysis" / "theorem" / "theorem.json", theorem())
    found = collect([str(stored / "grown")])
    assert [r.kind for r in found.general] == ["theorem"]
    assert found.ignored == []


def test_a_result_alone_makes_a_report(tmp_path):
    path = write_json(tmp_path / "h.json", heads("some/model", "a" * 12))
    write_json(tmp_path / "analysis" / "slots.json", slots("some/model", "a" * 12))
    (subject,) = collect([str(path)]).subjects
    assert subject.label == "some/model"
    assert kinds(subject) == ["heads", "slots"]


def test_json_of_other_programs_is_left_alone(stored, tmp_path):
    folder = tmp_path / "analysis"
    write_json(folder / "config.json", {"model_type": "llama"})
    write_json(folder / "other.json", {"kind": "midus.other"})
    (folder / "broken.json").write_text("{")
    write_json(folder / "checkpoint-3" / "heads.json", heads("m", "f" * 12))
    found = collect([str(stored / "grown")])
    assert not found.ignored
    assert not found.subjects[0].results


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kind": "midus.heads", "model": ', "Expecting value: line 1 column 34"),
        ("", "Expecting value: line 1 column 1"),
    ],
)
def test_a_broken_result_is_named_with_the_reason(stored, tmp_path, text, reason):
    path = tmp_path / "analysis" / "heads.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(MidusError) as error:
        collect([str(stored / "grown")])
    assert str(path.relative_to(tmp_path)) in str(error.value)
    assert reason in str(error.value)


def test_a_file_of_another_kind_is_refused_by_name(tmp_path):
    path = write_json(tmp_path / "x.json", {"kind": "heads"})
    with pytest.raises(MidusError, match=r"x\.json is no result file: its kind is 'heads'"):
        collect([str(path)])


def test_a_run_that_goes_on_shows_its_newest_checkpoint(stored, tmp_path):
    run = make_run(tmp_path / "run")
    (run / "result.json").unlink()
    (run / "checkpoint-9").mkdir()  # half removed: no config
    for name in ("checkpoint-5", "checkpoint-20"):
        shutil.copytree(stored / ("base" if name.endswith("5") else "grown"), run / name)
    (subject,) = collect([str(run)]).subjects
    assert subject.source == str(run / "checkpoint-20")
    assert [block.kind for block in subject.model.blocks].count("memory") == 2


def test_a_last_line_cut_short_is_left_out(tmp_path):
    run = make_run(tmp_path / "run")
    whole = collect([str(run)]).subjects[0].run.metrics
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "lo')
    assert collect([str(run)]).subjects[0].run.metrics == whole


def test_a_last_line_without_its_end_of_line_counts(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 25, "loss": 1.0}))
    assert collect([str(run)]).subjects[0].run.curve("loss")[-1] == (25, 1.0)


def test_labels_are_the_shortest_ends_that_differ(tmp_path):
    for name in ("a/run", "b/run", "c/other", "d/model"):
        (tmp_path / name).mkdir(parents=True)
    given = [str(tmp_path / name) for name in ("a/run", "b/run", "c/other", "d/model")]
    found = labels([*given, "some/hub-id"])
    assert found == ["a/run", "b/run", "other", "d/model", "some/hub-id"]

"""What was learnt against what was forgotten: one path a method, through its gates."""

import json

import pytest
from small import make_study

from midus.studies.forgetting_plot import FORGETTING_NAME, find_path, plot_forgetting
from midus.studies.report import make_report
from midus.studies.run import run_study


@pytest.fixture(scope="module")
def read(material, tmp_path_factory):
    """A study of one rate, two seeds and a text, with memory turned down."""
    out = tmp_path_factory.mktemp("read")
    study = make_study(
        material,
        search={"optimizer.lr": [1e-2]},
        seeds=[0, 1000],
        texts={"other": material["text"]},
        measure=["gates"],
    )
    run_study(study, out)
    return out


def scores(row):
    return row["test"]["perplexity"], row["texts"]["other"]["word_perplexity"]


def test_a_path_is_the_mean_over_seeds_as_trained_and_by_falling_gates(read):
    rows = [json.loads(line) for line in (read / "results.jsonl").read_text().splitlines()]
    memory = [row for row in rows if row["method"] == "hml"]
    lines = {line.label: line for line in make_report(read).lines}
    path = find_path(lines["hml"], "other")
    assert len(path) == 4
    turned = [row["measures"]["gates"]["0.8"] for row in memory]
    for point, read_at in ((path[0], memory), (path[-1], turned)):
        one, two = map(scores, read_at)
        assert point == pytest.approx([(a + b) / 2 for a, b in zip(one, two, strict=True)])
    assert len(find_path(lines["full"], "other")) == 1
    assert find_path(lines["hml"], None) == find_path(make_report(read).lines[-1], "other") == []


def test_a_gate_that_one_seed_lacks_is_left_out(read):
    (line,) = [line for line in make_report(read).lines if line.label == "hml"]
    del line.rows[0]["measures"]["gates"]["0.9"]
    assert len(find_path(line, "other")) == 3


def test_the_picture_is_in_the_report_of_a_study_with_texts(midus, read):
    told = midus("study", "report", read)
    assert told.code == 0, told.err
    assert f"({FORGETTING_NAME})" in (read / "report.md").read_text()
    assert (read / FORGETTING_NAME).stat().st_size > 0


def test_nothing_is_drawn_without_texts(finished, tmp_path):
    _, out, _ = finished
    assert plot_forgetting(make_report(out), tmp_path) == []
    assert not list(tmp_path.iterdir())

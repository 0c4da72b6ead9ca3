"""The report: chosen on validation, shown on test, and nothing left out in silence."""

from dataclasses import replace

import pytest
from small import MADE_UP, fake_row, make_study, report_of

from midus.errors import MidusError
from midus.studies.grid import search_trials
from midus.studies.plots import _curve, _distance, make_figure, name_points
from midus.studies.report import make_report, to_markdown
from midus.studies.results import add_result, read_results
from midus.studies.trials import UNTOUCHED, base_key, hash_facts

FULL = {"full": {}}


def test_the_report_chooses_on_validation_and_shows_test(tmp_path, material):
    figures = [(3.0, 1.0), (2.0, 9.0), (1.5, 4.0), (5.0, 0.1)]
    report = report_of(tmp_path, material, figures)
    shown = [
        (line.label, line.choice.setting, line.rows[0]["test"]["loss"]) for line in report.lines
    ]
    assert shown == [("hml", "lr=0.001", 4.0), ("full", "lr=0.01", 9.0)]
    text = to_markdown(report, [])
    assert "| hml | 2 | lr=0.001 | 2 | 1 | 15.000 | 40.000 | - | - |" in text


def test_seeds_are_averaged_and_a_setting_that_failed_once_is_not_chosen(tmp_path, material):
    figures = [(3.0, 3.0), (1.0, 1.0), (0.1, 0.1), None] * 2
    report = report_of(tmp_path, material, figures, seeds=[0, 1])
    (line, _) = report.lines
    assert (line.choice.setting, line.choice.num_failed) == ("lr=0.001", 1)
    assert "2 (" not in to_markdown(report, [])
    assert "20.000 ± 14.142" in to_markdown(report, [])


def test_the_best_value_at_the_edge_of_a_search_is_said(tmp_path, material):
    search = {"optimizer.lr": [1e-3, 1e-2, 1e-1]}
    figures = [(3.0, 3.0), (2.0, 2.0), (1.0, 1.0), (3.0, 3.0), (2.0, 2.0), (4.0, 4.0)]
    report = report_of(tmp_path, material, figures, search=search)
    assert {line.label: line.choice.at_edge for line in report.lines} == {
        "full": ("optimizer.lr",),
        "hml": (),
    }
    assert "full: the best optimizer.lr is the smallest or largest" in to_markdown(report, [])


def test_a_method_without_all_its_trials_is_missing(tmp_path, material):
    report = report_of(tmp_path, material, [(3.0, 1.0), (2.0, 9.0), None, None])
    assert report.missing == {"hml": "every trial failed"}


@pytest.mark.parametrize(
    ("own", "shown", "missing"),
    [
        (["left", (1.0, 3.0), "left"], None, "2 of 3 final seeds are left"),
        ([(9.9, 1.0), (1.0, 3.0), (1.0, 8.0)], "| 3 | 10.000 ± 0.000 | 40.000 ± 36.056 |", None),
        ([(9.9, 1.0), (1.0, 3.0), None], "| 2 of 3, 1 failed | 10.000 ± 0.000 | 20.000", None),
        ([(9.9, 1.0), (1.0, 3.0), (1.0, None)], "| 2 of 3, 1 failed | 10.000", None),
        ([None, None, None], None, "every final seed failed"),
    ],
    ids=["left", "done", "one failed", "one without a number", "all failed"],
)
def test_every_final_seed_is_accounted_for(tmp_path, material, own, shown, missing):
    # Seed 0 of the final round is the search's own row, which came first and counts.
    figures = [(3.0, 3.0), (1.0, 1.0)]
    seeds = [5, 6, 7] if own[0] is None or own[0] == "left" else [0, 6, 7]
    finals = [("full", 1e-2, own)]
    report = report_of(tmp_path, material, figures, finals, methods=FULL, final_seeds=seeds)
    assert report.missing == ({"full": missing} if missing else {})
    assert [line.label for line in report.lines] == ([] if missing else ["full"])
    assert shown is None or shown in to_markdown(report, [])


def test_the_base_shown_is_the_one_that_was_read_alike(tmp_path, material):
    study = make_study(material)
    trial = search_trials(study)[0]
    for precision, loss in (("float32", 4.0), ("mixed", 7.0)):
        options = replace(trial.options, precision=precision)
        base = replace(trial, method=UNTOUCHED, options=options)
        key = base_key(options, hash_facts(MADE_UP))
        add_result(tmp_path, fake_row(study, base, (loss, loss), key=key))
    report = report_of(tmp_path, material, [(1.0, 1.0)] * 4)
    assert [row["test"]["loss"] for row in report.lines[-1].rows] == [4.0]


def test_what_differs_among_trials_is_said_where_it_may(tmp_path, material):
    methods = {"full": {}, "half": {"set": {"batch_size": 2, "precision": "mixed"}}}
    study = {"methods": methods, "search": {}, "equal_trials": False}
    report = report_of(tmp_path / "a", material, [(1.0, 1.0)] * 2, **study)
    assert "Trials differ in batch_size, precision, so this compares" in to_markdown(report, [])
    study["methods"] = {"full": {}, "more": {"search": {"optimizer.lr": [1e-3, 1e-2]}}}
    text = to_markdown(report_of(tmp_path / "b", material, [(1.0, 1.0)] * 3, **study), [])
    assert "precision and evaluation are the same for every trial; methods differ in" in text
    report = report_of(tmp_path / "c", material, [(1.0, 1.0)] * 4)
    assert "the same for every trial; every method tries as many." in to_markdown(report, [])


@pytest.mark.parametrize(("graphed", "mark"), [(True, ""), (False, " †")])
def test_speeds_without_graphs_are_marked(tmp_path, material, graphed, mark):
    extra = {"tokens_per_second": 1234.0, "graphed": graphed}
    report = report_of(tmp_path, material, [(1.0, 1.0)], extra=extra, methods=FULL, search={})
    text = to_markdown(report, [])
    assert text.count(f"| 1,234{mark} | - |") == 2
    assert ("† Steps were no CUDA graphs" in text) is not graphed


def test_points_that_are_no_numbers_are_left_out_of_curves(tmp_path, material):
    curve = [{"tokens": 1, "validation_loss": None}, {"tokens": 2, "validation_loss": 3.0}]
    extra = {"curve": curve}
    report = report_of(tmp_path, material, [(1.0, 1.0)], extra=extra, methods=FULL, search={})
    assert _curve(report.lines[0]) == [(2, 3.0)]


def test_the_first_row_that_is_done_counts_and_a_later_one_for_its_model(tmp_path, material):
    study = make_study(material)
    trial = search_trials(study)[0]
    lines = [(None, {}), ((2.0, 2.0), {}), ((9.0, 9.0), {"model": "models/x"}), (None, {})]
    for figure, extra in lines:
        add_result(tmp_path, fake_row(study, trial, figure, **extra))
    (row,) = read_results(tmp_path).values()
    assert (row["validation"]["loss"], row["model"]) == (2.0, "models/x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"key": "x"}\n', "line 1 of .* is no result of a study: it has no identity"),
        (b"[]\n", "line 1 of .* is no result of a study"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_results_of_another_kind_are_refused(midus, tmp_path, material, line, message):
    report_of(tmp_path, material, [(1.0, 1.0)], methods=FULL, search={})
    (tmp_path / "results.jsonl").write_bytes(line)
    with pytest.raises(MidusError, match=message):
        make_report(tmp_path)
    assert midus("study", "report", tmp_path).code == 2


@pytest.mark.parametrize("upside_down", [False, True])
def test_names_stand_nearest_to_their_own_points(upside_down):
    """Two points that all but touch, in either order, and one apart."""
    figure, axes = make_figure((8.0, 4.2), "names")
    points = [(25.3, 4.51, "a long name of the lower one", "C0"), (25.3, 4.55, "upper", "C1")]
    points = [*(points[::-1] if upside_down else points), (53.1, 4.4, "apart", "C2")]
    axes.set(xscale="log", xlim=(10, 140), ylim=(4.2, 7))
    name_points(figure, axes, points)
    middles = {}
    for x, y, name, color in points:
        (text,) = [text for text in axes.texts if text.get_text() == name]
        assert text.get_color() == color
        box = text.get_window_extent()
        middles[name] = (box.y0 + box.y1) / 2
        others = {other: axes.transData.transform((a, b)) for a, b, other, _ in points}
        own = _distance(box, axes.transData.transform((x, y)))
        assert all(own <= _distance(box, place) for place in others.values()), name
    assert middles["a long name of the lower one"] < middles["upper"]

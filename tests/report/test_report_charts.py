"""Geometry and thinning of charts."""

import math
import random

import pytest

from midus.report.charts import HEIGHT, WIDTH, draw, thin, ticks
from midus.report.curves import training_charts
from midus.report.document import Chart, Series
from midus.report.runs import Run


def chart(*series, **options):
    return Chart("Loss", "step", "nats", list(series), **options)


def path_points(path):
    return [tuple(map(float, pair.split())) for pair in path.removeprefix("M").split("L")]


def test_points_stand_where_a_linear_scale_puts_them():
    drawing = draw(chart(Series("a", [(0, 0.0), (10, 4.0), (20, 2.0)]), from_zero=True))
    (x0, y0), (x1, y1), (x2, y2) = path_points(drawing.lines[0].path)
    assert (x0, x2) == (drawing.left, drawing.right)
    assert x1 == pytest.approx((drawing.left + drawing.right) / 2, abs=0.1)
    assert y0 == drawing.bottom
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)
    assert drawing.top < y1 < y0  # up is more


def test_ticks_stand_at_the_values_they_name():
    drawing = draw(chart(Series("a", [(0, 0.0), (100, 8.0)]), from_zero=True))
    (_, low), (_, high) = path_points(drawing.lines[0].path)
    for tick in drawing.y_ticks:
        assert tick.at == pytest.approx(low + float(tick.label) / 8 * (high - low), abs=0.1)
    assert [tick.label for tick in drawing.x_ticks] == ["0", "20", "40", "60", "80", "100"]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 1.25, ["0", "0.25", "0.50", "0.75", "1.00", "1.25"]),
        (2.93, 3.41, ["3.0", "3.1", "3.2", "3.3", "3.4"]),
        (0, 12_000, ["0", "2.5k", "5k", "7.5k", "10k"]),
        (0, 4e6, ["0", "1M", "2M", "3M", "4M"]),
        (-1, 1, ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        (0, 1e-5, ["0", "2e-6", "4e-6", "6e-6", "8e-6", "1e-5"]),
    ],
)
def test_tick_labels_are_round_and_tell_values_apart(low, high, labels):
    assert [label for _, label in ticks(low, high)] == labels


@pytest.mark.parametrize(
    "points",
    [
        [(0, 1.0)],
        [(5, 2.0), (6, 2.0)],
        [(0, 0.0), (1, 0.0)],
        [(1, 1e-300)],
        [(0, -3.0)],
        [(0, 1e12)],
    ],
)
def test_degenerate_series_are_drawn_inside_the_box(points):
    drawing = draw(chart(Series("a", points)))
    for x, y in path_points(drawing.lines[0].path):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


def test_values_far_apart_stand_on_a_logarithmic_axis():
    drawing = draw(chart(Series("a", [(0, 1.0), (1, 10.0), (2, 100.0)]), may_be_log=True))
    (_, low), (_, middle), (_, high) = path_points(drawing.lines[0].path)
    assert middle == pytest.approx((low + high) / 2, abs=0.1)
    assert drawing.y_label == "nats, logarithmic"
    assert [tick.label for tick in drawing.y_ticks] == ["1", "2", "5", "10", "20", "50", "100"]
    assert drawing.y_ticks[3].at == pytest.approx(middle, abs=0.1)


@pytest.mark.parametrize("smallest", [0.0, -1.0, 5.0])
def test_values_near_each_other_or_not_positive_stand_on_a_linear_axis(smallest):
    drawing = draw(chart(Series("a", [(0, smallest), (1, 100.0)]), may_be_log=True))
    assert drawing.y_label == "nats"


def test_a_lone_point_is_a_dot():
    assert draw(chart(Series("a", [(0, 1.0)]))).lines[0].dots
    assert not draw(chart(Series("a", [(0, 1.0), (1, 2.0)]))).lines[0].dots


def test_thinning_keeps_ends_and_extremes():
    rng = random.Random(0)
    points = [(float(i), rng.gauss(0, 1)) for i in range(50_000)]
    points[31_234] = (31_234.0, 99.0)
    points[777] = (777.0, -99.0)
    kept = thin(points)
    assert len(kept) <= 400
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert {(31_234.0, 99.0), (777.0, -99.0)} <= set(kept) <= set(points)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def test_short_series_are_not_thinned():
    points = [(float(i), math.sin(i)) for i in range(400)]
    assert thin(points) == points


def test_description_names_first_last_lowest_and_highest():
    text = draw(chart(Series("held-out", [(0, 3.25), (10, 1.5), (20, 2.0)]))).description
    assert "held-out: 3.25 at 0, 2 at 20; between 1.5 and 3.25." in text


def run(rows):
    return Run(None, rows, {}, {})


def titles(charts):
    return [chart.title for chart in charts]


def test_only_what_was_logged_becomes_a_chart():
    assert titles(training_charts([("a", run([{"step": 1, "loss": 2.0}]))])) == ["Loss"]
    assert training_charts([("a", run([{"step": 1, "epoch": 0.1}]))]) == []


def test_groups_with_one_rate_share_a_line():
    rows = [{"step": i, "lr/decay": 0.1, "lr/no_decay": 0.1, "lr/memory": 1.0} for i in (1, 2)]
    (rates,) = training_charts([("a", run(rows))])
    assert [series.label for series in rates.series] == ["decay and no decay", "memory"]


def test_several_runs_share_charts_in_colours_of_their_own():
    one = run([{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.0}])
    two = run([{"step": 1, "loss": 1.0}])
    (losses,) = training_charts([("one", one), ("two", two)])
    found = [(series.label, series.colour) for series in losses.series]
    assert found == [("one, training", 0), ("one, held-out", 0), ("two, training", 1)]


def test_slots_by_block_are_per_cent_before_and_after():
    rows = [
        {"step": 0, "slots_used/7": 0.5, "slots_used/10": 0.25},
        {"step": 9, "slots_used/7": 0.1, "slots_used/10": 0.3},
    ]
    over_steps, by_block = training_charts([("a", run(rows))])
    assert over_steps.series[0].points == [(0, 37.5), (9, 20.0)]
    assert over_steps.series[0].band == [(0, 25.0, 50.0), (9, 10.0, 30.0)]
    before, after = by_block.series
    assert before.points == [(7, 50.0), (10, 25.0)]
    assert after.points == [(7, 10.0), (10, 30.0)]


def test_values_that_are_no_numbers_are_left_out():
    rows = [{"step": 0, "loss": None}, {"step": 1, "loss": float("nan")}, {"step": 2, "loss": 1.0}]
    (losses,) = training_charts([("a", run(rows))])
    assert losses.series[0].points == [(2, 1.0)]


@pytest.mark.parametrize("value", [1e308, -1e308, 10**400], ids=["high", "low", "integer"])
def test_values_no_axis_can_hold_are_left_out(value):
    rows = [{"step": 0, "loss": value}, {"step": 1, "loss": -value}, {"step": 2, "loss": 1.0}]
    (losses,) = training_charts([("a", run(rows))])
    assert losses.series[0].points == [(2, 1.0)]
    assert draw(losses).y_ticks

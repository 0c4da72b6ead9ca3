"""What the pictures must not do: labels over each other, marks outside, axes without numbers."""

from itertools import pairwise

import pytest

from midus.analysis import slot_plots, theorem_plots
from midus.analysis.slots import BlockSlots

figures = pytest.importorskip("matplotlib.figure")


def axes_of(draw, *args):
    figure = figures.Figure(figsize=(4.5, 3.5))
    axes = figure.subplots()
    draw(axes, *args)
    figure.draw_without_rendering()
    return axes


def curve(shared, headwise, head_width=8):
    return {
        "rank": [0, 8, 16],
        "hive_loss": [1.0, 0.9, headwise],
        "shared_loss": shared,
        "headwise_loss": headwise,
        "head_width": head_width,
    }


@pytest.mark.parametrize(("shared", "headwise"), [(0.96, 0.95), (1.0, 0.99), (0.01, 0.0)])
def test_levels_near_each_other_have_labels_apart_and_inside(shared, headwise):
    axes = axes_of(theorem_plots._levels, curve(shared, headwise))
    above, below = (text.get_window_extent() for text in axes.texts[:2])
    box = axes.get_window_extent()
    assert box.y0 <= below.y0 < below.y1 < above.y0 < above.y1 <= box.y1


@pytest.mark.parametrize(("head_width", "num_marks"), [(16, 1), (17, 0)])
def test_a_width_beyond_the_ranks_has_no_mark(head_width, num_marks):
    axes = axes_of(theorem_plots._levels, curve(0.9, 0.5, head_width))
    assert sum("d_h" in text.get_text() for text in axes.texts) == num_marks


@pytest.mark.parametrize("edges", [[0.41, 0.44, 0.47], [0.9, 1.2, 2.5], [0.001, 0.1, 10.0]])
def test_norms_have_a_few_labels_that_stand_apart(edges):
    fields = dict.fromkeys(BlockSlots.__dataclass_fields__)
    norms = {"histogram": {"edges": edges, "counts": [3, 4]}, "zero_rows": 0}
    block = BlockSlots(**{**fields, "index": 1, "value_norms": norms})
    axes = axes_of(slot_plots._plot_norms, [block])
    ticks = [*axes.xaxis.get_ticklabels(), *axes.xaxis.get_ticklabels(minor=True)]
    box = axes.get_window_extent()
    boxes = sorted(
        (extent.x0, extent.x1)
        for label in ticks
        if label.get_text()
        and box.x0 - 1 <= (extent := label.get_window_extent()).x1
        and extent.x0 <= box.x1 + 1
    )
    assert len(boxes) >= 2
    assert all(left[1] < right[0] for left, right in pairwise(boxes))

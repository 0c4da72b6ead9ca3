import itertools

import pytest

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.upscaling.placement import (
    PLACEMENTS,
    anchors_of,
    choose_anchors,
    place,
    positions_of,
)

# The lists printed in the paper's appendix "DUS Placement Policy".
PAPER = {
    (16, 8, "top_heavy", "before"): [8, 10, 12, 14, 16, 18, 20, 22],
    (16, 8, "llama_pro", "after"): [2, 5, 8, 11, 14, 17, 20, 23],
    (16, 8, "distributed", "before"): [1, 4, 7, 10, 13, 16, 19, 22],
    (16, 8, "bottom_heavy", "before"): [0, 2, 4, 6, 8, 10, 12, 14],
    (32, 16, "top_heavy", "before"): [
        16,
        18,
        20,
        22,
        24,
        26,
        28,
        30,
        32,
        34,
        36,
        38,
        40,
        42,
        44,
        46,
    ],
    (32, 16, "llama_pro", "after"): [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35, 38, 41, 44, 47],
    (32, 16, "distributed", "before"): [
        1,
        4,
        7,
        10,
        13,
        16,
        19,
        22,
        25,
        28,
        31,
        34,
        37,
        40,
        43,
        46,
    ],
    (32, 16, "bottom_heavy", "before"): [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30],
}


@pytest.mark.parametrize("case", PAPER, ids=str)
def test_positions_are_the_papers_lists(case):
    depth, inserted, policy, side = case
    assert positions_of(place(policy, depth, inserted), side) == PAPER[case]


@pytest.mark.parametrize("policy", PLACEMENTS)
@pytest.mark.parametrize("side", ["before", "after"])
def test_any_number_from_1_to_all_works_and_positions_lead_back_to_anchors(policy, side):
    first = 1 if policy == "dense" else 0  # it leaves the base's first block out
    for depth in (1 + first, 5, 16, 30):
        for inserted in range(1, depth + 1 - first):
            anchors = place(policy, depth, inserted)
            assert len(set(anchors)) == inserted
            assert anchors == sorted(anchors)
            assert first <= anchors[0] <= anchors[-1] < depth
            positions = positions_of(anchors, side)
            assert anchors_of(positions, depth, side) == anchors


def test_two_blocks_may_share_an_anchor():
    assert anchors_of([1, 2], 4, "before") == [1, 1]
    assert anchors_of([1, 2], 4, "after") == [0, 0]


def test_order_of_positions_does_not_matter():
    assert anchors_of([4, 1], 4, "before") == anchors_of([1, 4], 4, "before")


@pytest.mark.parametrize(
    ("positions", "side", "message"),
    [
        ([1, 1], "before", "repeats an index"),
        ([6], "before", "outside the final stack of 5 blocks"),
        ([-1], "before", "outside the final stack"),
        ([4], "before", "no base block after it"),
        ([0], "after", "no base block before it"),
        ([], "before", "give 1 to 4"),
        ([0, 1, 2, 3, 4], "before", "give 1 to 4"),
    ],
)
def test_impossible_positions_are_refused(positions, side, message):
    with pytest.raises(MidusError, match=message):
        anchors_of(positions, 4, side)


@pytest.mark.parametrize("inserted", [0, 5])
def test_impossible_numbers_are_refused(inserted):
    with pytest.raises(MidusError, match=f"num_inserted={inserted} is out of range"):
        place("distributed", 4, inserted)


def test_dense_is_five_for_six_spread_evenly_and_none_at_the_first():
    config = UpscaleConfig(placement="dense")
    assert choose_anchors(config, 6, "distributed", "before") == [1, 2, 3, 4, 5]
    anchors = choose_anchors(config, 30, "distributed", "before")
    assert len(anchors) == 25
    assert (anchors[0], anchors[-1]) == (1, 29)
    assert {b - a for a, b in itertools.pairwise(anchors)} == {1, 2}
    fewer = UpscaleConfig(placement="dense", num_inserted=15)
    assert choose_anchors(fewer, 30, "distributed", "before") == list(range(1, 30, 2))
    assert len(choose_anchors(UpscaleConfig(), 30, "distributed", "before")) == 15


@pytest.mark.parametrize("depth", [1, 4])
def test_dense_needs_another_block_than_the_first(depth):
    with pytest.raises(MidusError, match=f"num_inserted={depth} is too many for placement='dense'"):
        place("dense", depth, depth)


def test_unknown_policy_lists_the_known_ones():
    with pytest.raises(MidusError, match="choose one of distributed, llama_pro"):
        place("middle", 4, 2)

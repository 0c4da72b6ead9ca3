"""Where inserted blocks stand: anchors (indices in the base) and positions (in the final stack).

Paper, Appendix "DUS Placement Policy". A policy gives anchors; whether a block stands before its
anchor (MIDUS, Eq. 4) or after it (interleaved copies, Eq. 3) is the method's side. Dense is beyond
the paper.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

from midus.config import UpscaleConfig
from midus.errors import MidusError

Side = Literal["before", "after"]


def _spread(num_base_layers: int, num_inserted: int) -> list[int]:
    return [(j + 1) * num_base_layers // num_inserted - 1 for j in range(num_inserted)]


def _last(num_base_layers: int, num_inserted: int) -> list[int]:
    return list(range(num_base_layers - num_inserted, num_base_layers))


def _first(num_base_layers: int, num_inserted: int) -> list[int]:
    return list(range(num_inserted))


def _spread_after_first(num_base_layers: int, num_inserted: int) -> list[int]:
    # Before the first block the stream is smallest, and a block there does harm in short runs.
    if num_inserted >= num_base_layers:
        raise MidusError(
            f"num_inserted={num_inserted} is too many for placement='dense', which leaves out the "
            f"first of the base's {num_base_layers} blocks; insert fewer than the base has, or use "
            "another placement"
        )
    step = Fraction(num_base_layers - 2, max(num_inserted - 1, 1))
    return [round(1 + j * step) for j in range(num_inserted)]


# The paper's Distributed and Llama Pro lists are one anchor schedule on two sides.
PLACEMENTS: dict[str, Callable[[int, int], list[int]]] = {
    "distributed": _spread,
    "llama_pro": _spread,
    "top_heavy": _last,
    "bottom_heavy": _first,
    "dense": _spread_after_first,
}
# How many blocks a placement inserts for so many of the base, where not one for two.
_SHARES = {"dense": Fraction(5, 6)}


def place(placement: str, num_base_layers: int, num_inserted: int) -> list[int]:
    """The anchors a policy chooses."""
    if placement not in PLACEMENTS:
        raise MidusError(
            f"placement={placement!r} is unknown; choose one of {', '.join(PLACEMENTS)}"
        )
    if num_base_layers < 1:
        raise MidusError(f"the base has {num_base_layers} blocks; there is nothing to grow")
    if not 1 <= num_inserted <= num_base_layers:
        raise MidusError(
            f"num_inserted={num_inserted} is out of range for a base of {num_base_layers} blocks; "
            f"choose 1 to {num_base_layers}"
        )
    return PLACEMENTS[placement](num_base_layers, num_inserted)


def choose_anchors(
    config: UpscaleConfig, num_base_layers: int, placement: str, side: Side
) -> list[int]:
    """The anchors a user asks for: by positions, by a placement, or by the method's own."""
    if config.positions is not None:
        return anchors_of(config.positions, num_base_layers, side)
    policy = config.placement or placement
    share = _SHARES.get(policy, Fraction(1, 2))
    num_inserted = config.num_inserted or max(int(num_base_layers * share), 1)
    return place(policy, num_base_layers, num_inserted)


def positions_of(anchors: Sequence[int], side: Side) -> list[int]:
    """Final-stack indices of blocks inserted before or after their anchors."""
    return [anchor + j + (side == "after") for j, anchor in enumerate(anchors)]


def anchors_of(positions: Sequence[int], num_base_layers: int, side: Side) -> list[int]:
    """The anchor of each final-stack position: the next base block, or the previous one."""
    given = list(positions)
    depth = num_base_layers + len(given)
    if not given or len(given) > num_base_layers:
        raise MidusError(
            f"positions={given} gives {len(given)} blocks to insert into a base of "
            f"{num_base_layers}; give 1 to {num_base_layers} of them"
        )
    if len(set(given)) != len(given):
        raise MidusError(f"positions={given} repeats an index; give each one once")
    if bad := [p for p in given if not 0 <= p < depth]:
        raise MidusError(
            f"positions={given} has {bad[0]}, outside the final stack of {depth} blocks; "
            f"use 0 to {depth - 1}"
        )
    anchors = [p - j - (side == "after") for j, p in enumerate(sorted(given))]
    if side == "before" and anchors[-1] >= num_base_layers:
        raise MidusError(
            f"positions={given} puts a block at {max(given)} with no base block after it; "
            "a block inserted before its anchor needs one"
        )
    if side == "after" and anchors[0] < 0:
        raise MidusError(
            f"positions={given} puts a block at {min(given)} with no base block before it; "
            "a block inserted after its anchor needs one"
        )
    return anchors

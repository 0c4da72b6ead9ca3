"""Two orders of the same things: ours beside the paper's, and which differences are settled."""

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

# Student's t that 5 % of differences between equals exceed, by degrees of freedom from 1 on.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One thing that both have a figure of."""

    label: str
    paper: float
    """Its one figure."""
    ours: list[float]
    """A figure a seed."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.ours)


@dataclass(frozen=True)
class Pair:
    """Two things, the one that is ahead here first."""

    ahead: Entry
    behind: Entry
    verdict: str
    """agree, disagree, undecided, or tied (the paper's figures are equal)."""
    is_reversed: bool
    """Whether the paper has the other one ahead."""
    has_one_seed: bool


@dataclass(frozen=True)
class Order:
    """Things by a figure of the paper's and by one of ours."""

    entries: list[Entry]
    paper_is_loss: bool
    """Whether less is better in the paper's figure."""
    ours_is_loss: bool

    def paper_ranks(self) -> list[str]:
        return _ranks([entry.paper for entry in self.entries], self.paper_is_loss)

    def our_ranks(self) -> list[str]:
        return _ranks([entry.mean for entry in self.entries], self.ours_is_loss)

    def tau(self) -> float | None:
        """Kendall's tau-b between the two; None where one of them knows no order."""
        signs = [
            (self._in_paper(*two), self._here(*two))
            for two in itertools.combinations(self.entries, 2)
        ]
        scale = math.sqrt(sum(a * a for a, _ in signs) * sum(b * b for _, b in signs))
        return sum(a * b for a, b in signs) / scale if scale else None

    def pairs(self) -> Iterator[Pair]:
        """Every two of them, with what can be said of their order."""
        for one, other in itertools.combinations(self.entries, 2):
            here, in_paper = self._here(one, other), self._in_paper(one, other)
            has_one_seed = min(len(one.ours), len(other.ours)) < 2
            if in_paper == 0:
                verdict = "tied"
            elif has_one_seed or not is_settled(one.ours, other.ours):
                verdict = "undecided"
            else:
                verdict = "agree" if here == in_paper else "disagree"
            ahead, behind = (other, one) if here > 0 else (one, other)
            yield Pair(ahead, behind, verdict, here * in_paper < 0, has_one_seed)

    def _in_paper(self, one: Entry, other: Entry) -> int:
        """-1 where the first is ahead, 1 where it is behind, 0 where they are equal."""
        return _sign(one.paper - other.paper, self.paper_is_loss)

    def _here(self, one: Entry, other: Entry) -> int:
        return _sign(one.mean - other.mean, self.ours_is_loss)


def is_settled(one: list[float], other: list[float]) -> bool:
    """Whether two means over seeds are further apart than seeds alone would put them.

    Welch's t-test at 5 %; for equals it errs towards calling them undecided.
    """
    parts = [(statistics.variance(own) / len(own), len(own) - 1) for own in (one, other)]
    error = math.sqrt(sum(part for part, _ in parts))
    distance = abs(statistics.mean(one) - statistics.mean(other))
    if not error:
        return distance > 0
    freedom = error**4 / sum(part**2 / count for part, count in parts)
    return distance > error * _student(freedom)


def _student(freedom: float) -> float:
    """The threshold, on straight lines between those of whole numbers; never too small a one."""
    freedom = max(freedom, 1.0)  # which rounding may have missed
    below = min(int(freedom), len(_STUDENT) - 1)
    start, end = _STUDENT[below - 1 : below + 1]
    return max(start + (freedom - below) * (end - start), _STUDENT[-1])


def _sign(difference: float, is_loss: bool) -> int:
    above = (difference > 0) - (difference < 0)
    return above if is_loss else -above


def _ranks(figures: list[float], is_loss: bool) -> list[str]:
    """From 1, the best; equal ones share the rank and are marked."""
    ahead = [sum(_sign(own - other, is_loss) > 0 for other in figures) for own in figures]
    return [
        f"{num + 1}{'=' if figures.count(own) > 1 else ''}"
        for num, own in zip(ahead, figures, strict=True)
    ]

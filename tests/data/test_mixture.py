"""Mixtures: exact proportions, the same every time."""

import pytest

from midus.data.tokens import MixtureDataset
from midus.errors import MidusError


def named(name, length):
    return [f"{name}{i}" for i in range(length)]


def test_sequences_alternate_by_weight():
    mixture = MixtureDataset([named("a", 9), named("b", 9)], [2, 1], 9)
    assert [mixture[i] for i in range(9)] == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"]


def test_every_prefix_holds_the_proportions():
    weights = [0.7, 0.2, 0.1]
    mixture = MixtureDataset([named(n, 1000) for n in "abc"], weights, 1000)
    counts = dict.fromkeys("abc", 0)
    for i in range(1000):
        counts[mixture[i][0]] += 1
        for name, weight in zip("abc", weights, strict=True):
            assert abs(counts[name] - weight * (i + 1)) < 1
    assert counts == {"a": 700, "b": 200, "c": 100}


def test_nothing_is_repeated_by_default():
    mixture = MixtureDataset([named("a", 100), named("b", 5)], [1, 1])
    items = [mixture[i] for i in range(len(mixture))]
    assert len(items) == len(set(items)) == 11  # the next would be b5
    assert mixture.repeats() == [0.06, 1.0]


def test_a_source_that_runs_out_starts_again():
    mixture = MixtureDataset([named("a", 100), named("b", 2)], [1, 1], 10)
    assert [mixture[i] for i in range(1, 10, 2)] == ["b0", "b1", "b0", "b1", "b0"]
    assert mixture.repeats()[1] == 2.5


def test_one_source_is_itself():
    data = named("a", 7)
    mixture = MixtureDataset([data], [0.3])
    assert [mixture[i] for i in range(len(mixture))] == data


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(MidusError, match="weights"):
        MixtureDataset([named("a", 1), named("b", 1)], weights)

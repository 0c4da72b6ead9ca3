"""Rows, batches of tokens, and log-likelihoods by hand."""

import random

import pytest
import torch
from tiny import tiny_base

from midus.evaluation.rows import Row, in_batches, log_likelihoods, make_rows


def test_requests_that_differ_in_the_last_token_share_a_row():
    pairs = [([1, 2], [3]), ([1, 2], [4]), ([1, 2], [3, 5]), ([1], [2, 6]), ([9], [3])]
    rows = make_rows(pairs, first=10)
    assert rows == [
        Row([1, 2], [10, 11, 13], [[3], [4], [2, 6]]),
        Row([1, 2, 3], [12], [[3, 5]]),
        Row([9], [14], [[3]]),
    ]


def test_a_batch_has_as_many_rows_as_its_tokens_hold():
    lengths = [50, 9, 9, 9, 9, 5, 5, 5, 5, 5, 5, 5, 2]
    batches = list(in_batches([Row([0] * n, [], []) for n in lengths], 36))
    assert [[row.num_tokens for row in batch] for batch in batches] == [
        [50],
        [9] * 4,
        [5] * 7,
        [2],
    ]


def test_padding_counts_where_a_longer_row_comes_late():
    batches = list(in_batches([Row([0] * n, [], []) for n in (2, 2, 2, 10, 2, 2)], 30))
    assert [[row.num_tokens for row in batch] for batch in batches] == [[2, 2, 2], [10, 2, 2]]


def test_answers_of_another_kind_are_no_neighbours_and_may_be_more():
    rows = [Row([0] * 4, [], []), *(Row([0] * 3, [], [], ("\n",), 1) for _ in range(9))]
    assert [len(batch) for batch in in_batches(rows, 4)] == [1, 8, 1]


def test_log_likelihoods_are_as_by_hand():
    model, draw = tiny_base(vocab_size=40).eval(), random.Random(0)
    pairs = [
        ([draw.randrange(40) for _ in range(context)], [draw.randrange(40) for _ in range(length)])
        for context, length in ((7, 1), (3, 4), (12, 2), (1, 1))
    ]
    pairs.append((pairs[0][0], [(pairs[0][1][0] + 1) % 40]))
    with torch.no_grad():
        # One request whose answer is the greedy one.
        pairs.append(([5, 6], [model(torch.tensor([[5, 6]])).logits[0, -1].argmax().item()]))
        found = log_likelihoods(model, make_rows(pairs, first=3))
        for number, value, is_greedy in found:
            context, continuation = pairs[number - 3]
            logits = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 :]
            scores = logits[:-1].double().log_softmax(-1)
            wanted = torch.tensor(continuation)
            assert value == pytest.approx(scores.gather(1, wanted[:, None]).sum().item(), abs=1e-5)
            assert is_greedy == (scores.argmax(-1) == wanted).all().item()
    assert sorted(number for number, *_ in found) == [3, 4, 5, 6, 7, 8]
    assert {number for number, _, is_greedy in found if is_greedy} >= {8}

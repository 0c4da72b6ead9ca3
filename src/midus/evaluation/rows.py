"""Requests as rows of tokens, rows in batches of so many tokens, log-likelihoods read off them.

Requests that differ in their last token only, such as the letters of a multiple choice, share a
row. Short rows come in large batches and long ones in small: a batch is as long as memory allows,
whatever its shape.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

# Written answers need the logits of one position a row, so a batch may be so much larger.
_WRITTEN = 8
_POSITIONS_AT_ONCE = 4096


@dataclass(frozen=True)
class Row:
    """One row of a batch, and the requests it answers."""

    tokens: list[int]
    ids: list[int]
    continuations: list[list[int]]
    """Of log-likelihoods: what is looked for at the end of the row; empty for written answers."""
    until: tuple[str, ...] = ()
    max_new_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.max_new_tokens


def make_rows(requests: Iterable[tuple[list[int], list[int]]], first: int = 0) -> list[Row]:
    """The rows that contexts and their continuations need, numbered from ``first``."""
    rows: dict[tuple[int, ...], Row] = {}
    for i, (context, continuation) in enumerate(requests):
        tokens = [*context, *continuation[:-1]]
        row = rows.setdefault(tuple(tokens), Row(tokens, [], []))
        row.ids.append(first + i)
        row.continuations.append(continuation)
    return list(rows.values())


def in_batches(rows: Iterable[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Neighbours in batches of so many tokens, padding included; a longer row is alone."""
    batch: list[Row] = []
    width = 0
    for row in rows:
        alike = not batch or (batch[0].until, batch[0].max_new_tokens) == (
            row.until,
            row.max_new_tokens,
        )
        width = max(width, row.num_tokens)
        budget = batch_tokens * (_WRITTEN if row.max_new_tokens else 1)
        if batch and (not alike or width * (len(batch) + 1) > budget):
            yield batch
            batch, width = [], row.num_tokens
        batch.append(row)
    if batch:
        yield batch


def log_likelihoods(model: Any, batch: list[Row]) -> list[tuple[int, float, bool]]:
    """Of each request: its number, its log-likelihood, and whether it is the greedy answer."""
    width = max(len(row.tokens) for row in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    for line, row in zip(ids, batch, strict=True):
        line[: len(row.tokens)] = torch.tensor(row.tokens)
    # Padding stands behind the text, where causal attention does not look.
    logits = model(ids.to(model.device), use_cache=False).logits  # [B, T, vocabulary]
    owner, line, column, wanted = _looked_for(batch).to(logits.device)
    num_requests = sum(len(row.ids) for row in batch)
    total = torch.zeros(num_requests, dtype=torch.float64, device=logits.device)
    misses = torch.zeros_like(total)
    for part in torch.arange(len(wanted), device=logits.device).split(_POSITIONS_AT_ONCE):
        scores = log_softmax(logits[line[part], column[part]].float(), -1)  # [part, vocabulary]
        found = scores.gather(1, wanted[part, None])[:, 0]
        total.index_add_(0, owner[part], found.double())
        misses.index_add_(0, owner[part], (scores.argmax(-1) != wanted[part]).double())
    numbers = [request for row in batch for request in row.ids]
    is_greedy = (misses == 0).tolist()
    return list(zip(numbers, total.tolist(), is_greedy, strict=True))


def _looked_for(batch: list[Row]) -> Tensor:
    """For every token of every continuation: whose it is, line and column of its logits, which."""
    owners: list[int] = []
    lines: list[int] = []
    columns: list[int] = []
    tokens: list[int] = []
    owner = 0
    for line, row in enumerate(batch):
        for continuation in row.continuations:
            num = len(continuation)
            owners += [owner] * num
            lines += [line] * num
            columns += range(len(row.tokens) - num, len(row.tokens))
            tokens += continuation
            owner += 1
    return torch.tensor([owners, lines, columns, tokens])  # [4, tokens]

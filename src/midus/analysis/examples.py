r"""Pairs of a context and its right continuation, as text and as tokens.

PIQA in the zero-shot form of lm-evaluation-harness: the context is ``Question: {goal}\nAnswer:``,
the continuation one space and the correct solution. (Bansal et al.'s code puts no space there.)
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from midus.data.options import SourceOptions
from midus.data.rows import Row, list_files, read_hub_rows, read_rows
from midus.errors import MidusError

_PIQA = SourceOptions(path="baber/piqa", split="validation")


@dataclass(frozen=True)
class Example:
    """One (x, y): the loss is that of the continuation alone."""

    context: str
    continuation: str
    task: str = "custom"


class EncodedExample(NamedTuple):
    """[x | y] as tokens."""

    ids: list[int]
    num_context: int
    """How many of them are the context's; at least one."""


def read_examples(path: str | Path, limit: int | None = None) -> list[Example]:
    """Examples of a file: PIQA's rows, or rows of ``context`` and ``continuation``.

    Args:
        path: A .jsonl file, packed or not, or any other kind ``midus data`` reads.
        limit: How many of the first rows to take; default: all.
    """
    rows = (
        (f"{file}:{row.number}", row)
        for file in list_files(SourceOptions(path=str(path)))
        for row in read_rows(file)
    )
    examples = list(islice(_examples(rows), limit))
    if not examples:
        raise MidusError(f"{path} holds no rows; give one JSON object a line")
    return examples


def load_piqa(limit: int | None = None) -> list[Example]:
    """PIQA's validation split from the hub, or its first rows."""
    rows = ((f"{_PIQA.path}, row {row.number}", row) for row in read_hub_rows(_PIQA, None))
    try:
        return list(islice(_examples(rows), limit))
    except MidusError as error:
        raise MidusError(
            f"PIQA cannot be had from the hub ({error.__cause__ or error}); "
            "give a file of its rows with --data"
        ) from error


def _examples(rows: Iterable[tuple[str, Row]]) -> Iterator[Example]:
    for place, row in rows:
        if row.problem:
            raise MidusError(f"{place}: {row.problem}; mend the row or leave it out")
        yield _example(row.value, place)


def _example(row: Any, place: str) -> Example:
    if not isinstance(row, dict):
        raise MidusError(f"{place}: a JSON {type(row).__name__}, not an object with fields")
    if "goal" in row:
        if row.get("label") not in (0, 1) or isinstance(row["label"], bool):
            raise MidusError(
                f"{place}: label={row.get('label')!r} must be 0 or 1, the solution that is correct"
            )
        solution = _text(row, f"sol{int(row['label']) + 1}", place)
        context = f"Question: {_text(row, 'goal', place)}\nAnswer:"
        return Example(context, f" {solution}", "piqa")
    if "context" in row or "continuation" in row:
        continuation = _text(row, "continuation", place)
        if not continuation:
            raise MidusError(f"{place}: continuation is empty; the loss is taken on it")
        return Example(_text(row, "context", place), continuation)
    raise MidusError(
        f"{place}: neither PIQA's fields (goal, sol1, sol2, label) nor context and continuation; "
        f"the row has {', '.join(sorted(row)) or 'no fields'}"
    )


def _text(row: dict[str, Any], name: str, place: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise MidusError(f"{place}: {name}={value!r} must be a text")
    return value


def encode_examples(
    examples: Iterable[Example], tokenizer: Any, window: int | None = None
) -> list[EncodedExample]:
    """Tokens of each example, split where the continuation begins, as the harness splits them.

    Context and continuation are encoded together and the context's own tokens counted off. The
    context loses its first tokens where both do not fit.

    Args:
        examples: The pairs.
        tokenizer: The model's tokenizer; it adds the special tokens it adds by itself.
        window: Most tokens the model reads; the last token of an example is never read.
    """
    encoded = [_encode(example, tokenizer) for example in examples]
    if window is None:
        return encoded
    fitted = [_fit(example, window) for example in encoded]
    shortened = sum(len(e.ids) > len(f.ids) for e, f in zip(encoded, fitted, strict=True))
    if shortened:
        warnings.warn(
            f"{shortened} of {len(encoded)} examples are longer than the model's {window} tokens; "
            "the beginning of their contexts is left out",
            stacklevel=2,
        )
    return fitted


def _encode(example: Example, tokenizer: Any) -> EncodedExample:
    # A space at the end of the context belongs to the first token of the continuation.
    context = example.context.rstrip()
    continuation = example.context[len(context) :] + example.continuation
    begin = tokenizer.encode(context)
    if context and begin:
        ids = tokenizer.encode(context + continuation)
    else:
        begin = [_first_token(tokenizer)]
        ids = begin + tokenizer.encode(continuation, add_special_tokens=False)
    if len(ids) <= len(begin):
        raise MidusError(
            f"the continuation {continuation[:60]!r} has no token of its own; leave the example out"
        )
    return EncodedExample(ids, len(begin))


def _first_token(tokenizer: Any) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise MidusError(
        "an example has no context and the tokenizer neither a BOS nor an EOS token to begin with; "
        "give every example a context"
    )


def _fit(example: EncodedExample, window: int) -> EncodedExample:
    num_continuation = len(example.ids) - example.num_context
    if num_continuation > window:
        raise MidusError(
            f"a continuation has {num_continuation} tokens and the model reads {window}; "
            "leave the example out"
        )
    too_many = max(len(example.ids) - 1 - window, 0)
    return EncodedExample(example.ids[too_many:], example.num_context - too_many)

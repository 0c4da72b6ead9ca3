"""Chooses and orders tokenised documents and writes them as a token folder.

A document's place is a hash of its text and the seed, and its split a hash of its text alone
(`split_hash`). So the result is a function of the documents, whoever tokenised them and in what
order.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from midus.data.documents import HASHED_SPLITS, content_hash
from midus.data.plan import BuildPlan
from midus.data.rows import MANIFEST_NAME, NUM_NAMED
from midus.errors import MidusError

# One line a document: its place in the order, the hash that decides its split, how much there is of
# it (tokens, or bytes in a survey) and the source it is from.
INDEX = np.dtype([("order", "<u8"), ("split", "<u8"), ("size", "<u8"), ("source", "<u2")])

Index = np.ndarray[Any, Any]


class Chosen(NamedTuple):
    """Documents of a split in their order: their lines in the index, and the tokens of each."""

    lines: Index
    sizes: Index


class TooFewChosen(Exception):
    """The documents chosen by the survey hold fewer tokens than wanted; choose more of them."""


def index_line(text: str, size: int, source: int, plan: BuildPlan) -> tuple[int, int, int, int]:
    """One line of the index."""
    # The exact text's: texts that differ in whitespace have places of their own.
    salted = f"{plan.seed}:{content_hash(text)}".encode()
    order = int.from_bytes(hashlib.blake2b(salted, digest_size=8).digest(), "little")
    return order, plan.split_hash(text), size, source


def last_places(plan: BuildPlan) -> dict[tuple[int, str], int]:
    """Up to which place documents are tokenised, by group and split.

    Empty without a survey: then everything that is read is tokenised.
    """
    if not plan.is_surveyed:
        return {}
    survey = np.concatenate([np.load(path) for path in _sorted(plan, "survey", "*.npy")])
    places = {}
    for split in plan.splits:
        for group, wanted in plan.wanted(split).items():
            lines = _of_group(survey, plan, group, split)
            lines = lines[np.argsort(lines["order"])]
            enough = np.cumsum(lines["size"]) >= (wanted or 0) * plan.bytes_per_token
            last = int(lines["order"][enough.argmax()]) if enough.any() else 2**64
            places[group, split] = last
    return places


def merge(plan: BuildPlan, folder: Path) -> None:
    """Writes the token folder of a plan whose documents are all tokenised."""
    indices = [np.load(path) for path in _sorted(plan, "tokens", "*.npy")]
    facts = [json.loads(path.read_text()) for path in _sorted(plan, "facts", "*.json")]
    streams = [_map(path, plan) for path in _sorted(plan, "tokens", "*.ds")]
    index = np.concatenate(indices)
    starts = np.concatenate([np.cumsum(part["size"]) - part["size"] for part in indices])
    stream = np.repeat(np.arange(len(indices)), [len(part) for part in indices])

    def documents(chosen: Chosen) -> Iterator[Index]:
        for line, size in zip(*chosen, strict=True):
            start = int(starts[line])
            tokens = streams[stream[line]][start : start + int(size)]
            if size < index["size"][line]:
                tokens = tokens.copy()
                tokens[-1] = plan.encoding.eos_token_id  # a document that was cut still ends
            yield tokens

    chosen = {split: _choose(index, plan, split) for split in plan.splits}
    if not len(chosen["train"].lines):
        raise MidusError(_no_documents(plan, facts))
    splits = {}
    for split, taken in chosen.items():
        files = list(_write_files(documents(taken), folder, split, plan))
        splits[split] = {**_counts(taken.sizes), "files": files}
    manifest = _manifest(plan, index, chosen, facts, splits)
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def _sorted(plan: BuildPlan, folder: str, pattern: str) -> list[Path]:
    return sorted((plan.work_folder / folder).glob(pattern))


def _map(path: Path, plan: BuildPlan) -> Index:
    dtype = np.dtype(plan.encoding.dtype).newbyteorder("<")
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def _is_in(index: Index, plan: BuildPlan, split: str) -> Index:
    """`split_of`, for all documents at once."""
    limits = np.array(plan.limits, np.uint64)
    is_in: Index = np.searchsorted(limits, index["split"], "right") == HASHED_SPLITS.index(split)
    return is_in


def _of_group(index: Index, plan: BuildPlan, group: int, split: str) -> Index:
    in_group = index["source"] == group if plan.by_weight else np.ones(len(index), bool)
    lines: Index = index[in_group & _is_in(index, plan, split)]
    return lines


def _choose(index: Index, plan: BuildPlan, split: str) -> Chosen:
    """Which documents make up a split."""
    is_in_split = _is_in(index, plan, split)
    in_order = np.lexsort((index["source"], index["order"]))
    in_order = in_order[is_in_split[in_order]]
    sizes = index["size"][in_order].astype(np.int64)
    groups = index["source"][in_order] if plan.by_weight else np.zeros(len(in_order), np.int64)
    taken = sizes.copy()
    for group, wanted in plan.wanted(split).items():
        if wanted is None:
            continue
        mine = groups == group
        before = np.cumsum(sizes[mine]) - sizes[mine]
        taken[mine] = np.clip(wanted - before, 0, sizes[mine])
        if taken[mine].sum() < wanted and _left_over(plan, group, split):
            raise TooFewChosen(f"{plan.bytes_per_token} bytes a token were not enough")
    return Chosen(in_order[taken > 0], taken[taken > 0])


def _left_over(plan: BuildPlan, group: int, split: str) -> bool:
    """Whether the survey left out documents of a group."""
    return last_places(plan).get((group, split), 2**64) < 2**64


def _write_files(
    documents: Iterator[Index], folder: Path, split: str, plan: BuildPlan
) -> Iterator[dict[str, Any]]:
    """Writes one stream of tokens as files of ``shard_tokens`` and yields what was written."""
    number, rest = 0, next(documents, None)
    while rest is not None:
        name = f"{split}-{number:05d}.bin"
        digest, num_tokens = hashlib.sha256(), 0
        with (folder / name).open("wb") as file:
            while rest is not None and num_tokens < plan.shard_tokens:
                piece = rest[: plan.shard_tokens - num_tokens]
                rest = rest[len(piece) :] if len(piece) < len(rest) else next(documents, None)
                data = piece.tobytes()
                file.write(data)
                digest.update(data)
                num_tokens += len(piece)
            num_bytes = file.tell()
        yield {"name": name, "bytes": num_bytes, "sha256": digest.hexdigest()}
        number += 1


def _manifest(
    plan: BuildPlan,
    index: Index,
    chosen: dict[str, Chosen],
    facts: list[dict[str, Any]],
    splits: dict[str, Any],
) -> dict[str, Any]:
    hashes = {int(k): v for fact in facts for k, v in fact["inputs"].items()}
    sources = []
    for number, source in enumerate(plan.sources):
        entry: dict[str, Any] = asdict(source)
        entry["documents_read"] = sum(fact["read"][number] for fact in facts)
        entry["bad_rows"] = sum(fact["bad"][number] for fact in facts)
        for split, taken in chosen.items():
            entry[split] = _counts(taken.sizes[index["source"][taken.lines] == number])
        inputs = [(i, item) for i, item in enumerate(plan.inputs) if item.source == number]
        if inputs[0][1].path is None:
            entry["revision"] = inputs[0][1].revision
        else:
            entry["inputs"] = [{"path": item.path, **hashes[i]} for i, item in inputs]
        sources.append(entry)
    return {
        # What reads these folders is in `tokens`, which needs torch; builds on a cluster do not.
        "format": "midus-tokens",
        "version": 1,
        "dtype": plan.encoding.dtype,
        "tokenizer": plan.encoding.facts(),
        "seed": plan.seed,
        "held_out": plan.held_out,
        "max_tokens": plan.max_tokens,
        "eval_tokens": plan.eval_tokens,
        **({"test": plan.test, "test_tokens": plan.test_tokens} if plan.test else {}),
        "shard_tokens": plan.shard_tokens,
        "by_weight": plan.by_weight,
        "splits": splits,
        "sources": sources,
        "bad_rows": {"count": sum(s["bad_rows"] for s in sources), "first": _first_bad(facts)},
    }


def _counts(sizes: Index) -> dict[str, int]:
    return {"documents": len(sizes), "tokens": int(sizes.sum())}


def _first_bad(facts: list[dict[str, Any]]) -> list[dict[str, str]]:
    named = sorted(tuple(bad) for fact in facts for bad in fact["named"])
    return [{"where": where, "reason": reason} for _, _, where, reason in named[:NUM_NAMED]]


def _no_documents(plan: BuildPlan, facts: list[dict[str, Any]]) -> str:
    paths = ", ".join(source.path for source in plan.sources)
    bad = sum(sum(fact["bad"]) for fact in facts)
    if not bad:
        return f"{paths} holds no text to train on; add some, or lower held_out={plan.held_out}"
    first = _first_bad(facts)[0]
    return (
        f"{paths} holds no usable documents: {bad:,} rows are bad, the first at {first['where']} "
        f"({first['reason']}); name the field with the text as text_field"
    )

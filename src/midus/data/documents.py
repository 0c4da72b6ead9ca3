"""Documents of a source: the texts of its rows, and where each of them stands."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from midus.data.options import SourceOptions
from midus.data.rows import (
    BadRows,
    Row,
    hub_revision,
    is_hub_dataset,
    is_text_file,
    list_files,
    read_hub_rows,
    read_rows,
)


def read_documents(
    source: SourceOptions, bad_rows: BadRows | None = None
) -> Iterator[tuple[str, str]]:
    """All documents of a source as ``(text, where)``, file by file in the order of their names."""
    bad_rows = BadRows() if bad_rows is None else bad_rows
    if is_hub_dataset(source):
        rows = read_hub_rows(source, hub_revision(source))
        yield from texts(rows, source.path, source.text_field, bad_rows)
        return
    for path in list_files(source):
        yield from file_documents(path, source.text_field, bad_rows)


def file_documents(
    path: Path, text_field: str, bad_rows: BadRows, stripe: int = 0, num_stripes: int = 1
) -> Iterator[tuple[str, str]]:
    """Documents of one file; a text file is one document."""
    if is_text_file(path):
        text_field = "text"
    rows = read_rows(path, stripe, num_stripes, text_field)
    yield from texts(rows, str(path), text_field, bad_rows)


def texts(
    rows: Iterable[Row], place: str, text_field: str, bad_rows: BadRows
) -> Iterator[tuple[str, str]]:
    """The texts of rows, with the rows that have none added to ``bad_rows``."""
    for row in rows:
        where = f"{place}:{row.number}"
        problem = row.problem or text_problem(row.value, text_field)
        if problem:
            bad_rows.add(row.number, where, problem)
        else:
            yield row.value[text_field], where


def text_problem(row: Any, text_field: str) -> str | None:
    """What keeps a row's field from being a text to train on, or None."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__} instead of fields by name"
    if text_field not in row:
        return f"no field {text_field!r}"
    text = row[text_field]
    if not isinstance(text, str):
        return f"field {text_field!r} is a {type(text).__name__}, not a text"
    if not text.strip():
        return f"field {text_field!r} is empty"
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return f"field {text_field!r} is not valid Unicode"
    return None


# In the order in which they cut up the range of hashes.
HASHED_SPLITS = ("held_out", "test", "train")


def content_hash(text: str) -> int:
    """64 bits that depend on the text alone: equal texts are in one split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def split_hash(text: str, has_test: bool) -> int:
    """What decides a text's split; beside a test split, copies that differ in whitespace share it.

    Without a test split it is `content_hash`, so folders of two splits keep their bytes.
    """
    return content_hash(" ".join(text.split()) if has_test else text)


def held_out_limit(share: float) -> int:
    """Texts whose hash is below this are held out."""
    return int(share * 2**64)


def split_limits(held_out: float, test: float) -> tuple[int, int]:
    """The hashes at which ``test`` and ``train`` begin; below the first a text is held out."""
    return held_out_limit(held_out), held_out_limit(held_out + test)


def split_of(content: int, limits: tuple[int, int]) -> str:
    """The split of a text, by its `split_hash`."""
    return HASHED_SPLITS[bisect_right(limits, content)]

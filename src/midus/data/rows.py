"""Rows of local files and hub datasets, whatever they are stored in.

A row that cannot be read is no reason to stop a long job: readers hand over what is wrong with it
and go on, and `BadRows` counts such rows and names the first of them.
"""

import glob
import importlib.util
import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from midus.data.options import SourceOptions
from midus.errors import MidusError

MANIFEST_NAME = "manifest.json"
NUM_NAMED = 20
_PACKED = [kind + end for kind in (".jsonl", ".json", ".txt") for end in ("", ".gz", ".xz", ".zst")]
SUFFIXES = (*_PACKED, ".parquet")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Row(NamedTuple):
    """One row: its number in the file, counted from 1, and its value or what is wrong with it."""

    number: int
    value: Any
    problem: str | None = None


@dataclass
class BadRows:
    """Counts rows that could not be used and names the first of them."""

    count: int = 0
    named: list[tuple[int, str, str]] = field(default_factory=list)
    """Row number, where it stands, and what is wrong with it."""

    def add(self, number: int, where: str, reason: str) -> None:
        self.count += 1
        if len(self.named) < NUM_NAMED:
            self.named.append((number, where, reason))


def require(package: str, purpose: str) -> None:
    """Refuses what needs a package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MidusError(f"{purpose} needs the package {package}; run: pip install midus[train]")


def is_token_folder(path: str | Path) -> bool:
    """Whether `midus data build` wrote this folder."""
    return (Path(path).expanduser() / MANIFEST_NAME).is_file()


def is_hub_dataset(source: SourceOptions) -> bool:
    """Whether a source is read from the hub: it looks like an id and nothing local has its name."""
    path = Path(source.path).expanduser()
    looks_local = path.exists() or glob.has_magic(source.path) or _suffix(path) is not None
    return not looks_local and bool(_HUB_ID.fullmatch(source.path))


def is_text_file(path: Path) -> bool:
    """Whether a file is one document as it is."""
    return (_suffix(path) or "").startswith(".txt")


def list_files(source: SourceOptions) -> list[Path]:
    """The files of a local source, in the order of their names."""
    path = Path(source.path).expanduser()
    if source.name or source.files:
        option = "name" if source.name else "files"
        raise MidusError(
            f"{option}={getattr(source, option)!r} is an option of hub datasets and {source.path} "
            "is local; leave it out and give a pattern as path"
        )
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p))
    elif glob.has_magic(source.path):
        found = glob.glob(str(path), recursive=True)
        files = sorted(Path(name) for name in found if Path(name).is_file())
    else:
        raise MidusError(f"{source.path} does not exist; give a file, a folder or a hub dataset id")
    if not files:
        raise MidusError(f"{source.path} holds no files of the kinds {', '.join(SUFFIXES)}")
    for file in files:
        if _suffix(file) is None:
            raise MidusError(f"{file} is of an unknown kind; known kinds: {', '.join(SUFFIXES)}")
    return files


def read_rows(
    path: Path, stripe: int = 0, num_stripes: int = 1, column: str | None = None
) -> Iterator[Row]:
    """Rows of one file.

    Args:
        path: The file.
        stripe: With stripes, which of the first rows to begin with.
        num_stripes: Every how-manieth row to read.
        column: The one field that is needed, where a file can be read by columns.
    """
    suffix = _suffix(path) or ""
    if suffix == ".parquet":
        rows = _parquet_rows(path, column)
    elif suffix.startswith(".jsonl"):
        rows = _json_lines(path, stripe, num_stripes)
    elif suffix.startswith(".json"):
        rows = _json_list(path)
    else:
        rows = iter([_whole_text(path)])
    try:
        for row in rows:
            if (row.number - 1) % num_stripes == stripe:
                yield row
    except MidusError:
        raise
    except Exception as error:
        # Each packing has its own errors, and zstandard's are not OSErrors.
        reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
        raise MidusError(f"{path} cannot be read to its end ({reason}); fetch it again") from error


def read_hub_rows(
    source: SourceOptions, revision: str | None, stripe: int = 0, num_stripes: int = 1
) -> Iterator[Row]:
    """Rows of a hub dataset, streamed."""
    require("datasets", f"reading {source.path}")
    import datasets

    patterns = [part.strip() for part in source.files.split(",")] if source.files else None
    try:
        stream: Any = datasets.load_dataset(
            source.path,
            name=source.name,
            split=source.split,
            data_files=patterns,
            revision=revision,
            streaming=True,
        )
        if num_stripes > 1:
            from datasets.distributed import split_dataset_by_node

            stream = split_dataset_by_node(stream, rank=stripe, world_size=num_stripes)
        for number, value in enumerate(stream, start=1):
            yield Row(number, value)
    except Exception as error:
        # The hub, its client, the network and each file format have errors of their own.
        reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
        raise MidusError(
            f"{source.path} is neither local nor a hub dataset that could be read ({reason}); "
            "check its id, name, split and files, and the connection"
        ) from error


def hub_revision(source: SourceOptions) -> str | None:
    """The commit a hub dataset stands at, or None where the hub does not answer."""
    from huggingface_hub import HfApi

    with suppress(Exception):  # offline, a mirror without commits, a private proxy: all the same
        return HfApi().dataset_info(source.path).sha
    return None


def _suffix(path: Path) -> str | None:
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), None)


def open_file(path: Path) -> Any:
    """A file's bytes, unpacked by its ending."""
    packing = path.suffix.lower()
    if packing == ".gz":
        import gzip

        return gzip.open(path)
    if packing == ".xz":
        import lzma

        return lzma.open(path)
    if packing == ".zst":
        require("zstandard", f"reading {path}")
        import zstandard

        # A file of several frames, as parallel packers write it, is one stream.
        reader = zstandard.ZstdDecompressor().stream_reader(
            path.open("rb"), read_across_frames=True
        )
        return io.BufferedReader(reader)
    return path.open("rb")


def _json_lines(path: Path, stripe: int, num_stripes: int) -> Iterator[Row]:
    # Bytes are split on "\n" only: texts contain U+2028, U+0085 and the like.
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if (number - 1) % num_stripes != stripe or not line.strip():
                continue
            try:
                yield Row(number, json.loads(line.decode("utf-8-sig")))
            except UnicodeDecodeError:
                yield Row(number, None, "not UTF-8")
            except (ValueError, RecursionError) as error:
                yield Row(number, None, f"invalid JSON ({error})")


def _json_list(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        values = json.loads(file.read().decode("utf-8-sig"))
    if not isinstance(values, list):
        raise MidusError(
            f"{path} holds a JSON {type(values).__name__}, not a list of rows; "
            "write one row a line into a .jsonl file"
        )
    for number, value in enumerate(values, start=1):
        yield Row(number, value)


def _parquet_rows(path: Path, column: str | None) -> Iterator[Row]:
    require("pyarrow", f"reading {path}")
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        # Without the column all are read, and every row is named as one that lacks it.
        columns = [column] if column in file.schema_arrow.names else None
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for value in batch.to_pylist():
                number += 1
                yield Row(number, value)


def _whole_text(path: Path) -> Row:
    with open_file(path) as file:
        data = file.read()
    try:
        return Row(1, {"text": data.decode("utf-8-sig")})
    except UnicodeDecodeError:
        return Row(1, None, "not UTF-8")

"""Safetensors files read and copied one tensor at a time, so that memory stays small.

The safetensors package maps whole files; here a tensor is read into fresh memory, and a file is
copied under new tensor names without ever being held. The layout (8 bytes of header length, a JSON
header, the data) is the safetensors format itself.
"""

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.models.untrusted import is_whole, parse_json, read_json, refuse_escape, shown

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_CHUNK = 8 << 20
_MAX_HEADER = 100 << 20
_MAX_DIMS = 64
_MAX_ELEMENTS = 2**60

# The whole numbers of a grown model: BatchNorm's count of the batches it saw, and UltraMem's order
# of its slots.
_WHOLE_NUMBERS = ("num_batches_tracked", "memory.values.permutation")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SHARD = re.compile(r"(?!\.)[\w.+ -]{1,200}\.safetensors")

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: its file and the bytes in it."""

    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        if self.dtype_name not in _DTYPES:
            raise MidusError(
                f"{self.file} holds a tensor of type {shown(self.dtype_name)}, which is not "
                f"supported; known types: {', '.join(_DTYPES)}"
            )
        return _DTYPES[self.dtype_name]


class Weights(Mapping[str, TensorEntry]):
    """The tensors of one checkpoint, by name, whatever files they lie in."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @classmethod
    def open_file(cls, path: Path) -> "Weights":
        """The tensors of one safetensors file, its header checked against its size."""
        return cls(_read_header(path))

    @classmethod
    def open_folder(cls, folder: Path) -> "Weights":
        """The tensors of a Hugging Face folder, sharded or not."""
        entries: dict[str, TensorEntry] = {}
        for path in _weight_files(folder):
            found = _read_header(path)
            if twice := entries.keys() & found.keys():
                name = min(twice)
                raise MidusError(
                    f"{path} and {entries[name].file.name} both hold {shown(name)!r}; "
                    "fetch the checkpoint again"
                )
            entries.update(found)
        return cls(entries)

    def by_file(self) -> dict[Path, list[str]]:
        """Tensor names by file, each file's in the order of its data."""
        files: dict[Path, list[str]] = {}
        for name in sorted(self, key=lambda name: self[name].start):
            files.setdefault(self[name].file, []).append(name)
        return dict(sorted(files.items()))

    def num_bytes(self) -> int:
        return sum(entry.stop - entry.start for entry in self.values())

    def read(self, name: str, first_row: int = 0, num_rows: int | None = None) -> Tensor:
        """A tensor, or some of its rows, in fresh memory."""
        entry = self[name]
        shape = entry.shape
        row_bytes = (entry.stop - entry.start) // shape[0] if shape and shape[0] else 0
        start = entry.start
        if num_rows is not None and shape:
            start += first_row * row_bytes
            shape = (num_rows, *shape[1:])
        tensor = torch.empty(shape, dtype=entry.dtype)
        if tensor.numel():
            buffer = tensor.reshape(-1).view(torch.uint8).numpy().data
            with entry.file.open("rb") as file:
                file.seek(start)
                if file.readinto(buffer) != len(buffer):
                    raise MidusError(f"{entry.file} ends inside tensor {name!r}; fetch it again")
        return tensor

    def raw(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor, in pieces."""
        entry = self[name]
        with entry.file.open("rb") as file:
            file.seek(entry.start)
            left = entry.stop - entry.start
            while left:
                piece = file.read(min(left, _CHUNK))
                if not piece:
                    raise MidusError(f"{entry.file} ends inside tensor {name!r}; fetch it again")
                left -= len(piece)
                yield piece


def write_copy(
    path: Path,
    weights: Weights,
    names: dict[str, str],
    dtype: torch.dtype | None = None,
) -> None:
    """Writes tensors of ``weights`` under new names, one at a time.

    Args:
        path: File to write.
        weights: Where the tensors come from.
        names: New name by old name, in the order to write.
        dtype: Type to convert floating-point tensors to; default: byte for byte as they are.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for old, new in names.items():
        entry = weights[old]
        target = _converted(entry, dtype)
        begin, end = end, end + prod(entry.shape) * target.itemsize
        header[new] = {
            "dtype": _DTYPE_NAMES[target],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for old in names:
            if _converted(weights[old], dtype) == weights[old].dtype:
                for piece in weights.raw(old):
                    file.write(piece)
            else:
                assert dtype is not None
                file.write(tensor_bytes(_narrowed(weights.read(old), dtype, old)))


def _narrowed(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = converted.isinf() & tensor.isfinite()
        if lost.any():
            largest = tensor.abs().max().item()
            raise MidusError(
                f"{name} has values up to {largest:.3g}, which dtype={str(dtype)[6:]} cannot hold; "
                "use bfloat16, or float32"
            )
    return converted


def same_tensor(a: Weights, name_a: str, b: Weights, name_b: str, dtype: torch.dtype) -> bool:
    """Whether two stored tensors agree byte for byte once the first is converted to ``dtype``."""
    if a[name_a].shape != b[name_b].shape:
        return False
    if _converted(a[name_a], dtype) == a[name_a].dtype == b[name_b].dtype:
        return all(x == y for x, y in zip(a.raw(name_a), b.raw(name_b), strict=True))
    converted = a.read(name_a).to(_converted(a[name_a], dtype))
    return tensor_bytes(converted) == tensor_bytes(b.read(name_b))


def tensor_bytes(tensor: Tensor) -> bytes:
    """The tensor's elements as they lie in memory, row by row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def dtype_named(name: str) -> torch.dtype:
    """A floating-point type by its torch name."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise MidusError(f"dtype={name!r} is unknown; choose one of {', '.join(known)}")
    return known[name]


def _converted(entry: TensorEntry, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype


def require_floats(weights: Weights, source: str | Path) -> None:
    """Refuses whole numbers and 8-bit types, which only a quantized model has for weights."""
    for name, entry in weights.items():
        is_float = entry.dtype.is_floating_point and entry.dtype.itemsize > 1
        if not is_float and not name.endswith(_WHOLE_NUMBERS):
            raise MidusError(
                f"{source} has {shown(name)!r} of type {entry.dtype_name}, where float32, bfloat16 "
                "or float16 belongs; use the unquantized model"
            )


def require_finite(tensor: Tensor, name: str, source: str | Path) -> Tensor:
    """Refuses a tensor that holds NaN or infinity; returns it."""
    if tensor.is_floating_point() and tensor.numel():
        low, high = tensor.aminmax()  # one pass, no copy; NaN comes through
        if not (low.isfinite() and high.isfinite()):
            raise MidusError(
                f"{source} has NaN or infinity in {shown(name)!r}, so its training diverged or the "
                "file is damaged; use an earlier checkpoint or fetch it again"
            )
    return tensor


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    shards = _shards(index) if index.is_file() else []
    # A single file comes before an index, as in transformers: both must read the same weights.
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    if shards:
        return shards
    if (folder / "delta.safetensors").is_file():
        raise MidusError(
            f"{folder} is a delta, which holds no whole model; make one with midus merge"
        )
    if any(path for suffix in _PICKLES for path in folder.glob(f"*{suffix}")):
        raise MidusError(
            f"{folder} has pickle weights only (.bin), which can run code when opened; "
            "convert them to safetensors and use that folder"
        )
    raise MidusError(
        f"{folder} has no weights ({SINGLE_NAME} or {INDEX_NAME}); download the whole model"
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = list(read_json(index)["weight_map"].values())
    except MidusError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise MidusError(
            f"{index} is not a safetensors index ({shown(error)}); fetch it again"
        ) from error
    for name in names:
        if not isinstance(name, str) or not _SHARD.fullmatch(name):
            raise MidusError(
                f"{index} names {shown(repr(name))}, not a file beside it; do not use it"
            )
    return [index.parent / name for name in sorted(set(names))]


def _read_header(path: Path) -> dict[str, TensorEntry]:
    """Where each tensor lies; nothing is read or allocated that the file does not hold."""
    if not refuse_escape(path).is_file():
        raise MidusError(f"{path} is missing; fetch the checkpoint again")
    size = path.stat().st_size
    broken = f"{path} is not a whole safetensors file ({size:,} bytes{{}}); fetch it again"
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if length > min(_MAX_HEADER, size):
            raise MidusError(broken.format(""))
        text = file.read(length)
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        entries = {name: _make_entry(path, info, 8 + length, size) for name, info in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MidusError(broken.format(f": {shown(error)}")) from error
    if max((entry.stop for entry in entries.values()), default=8 + length) != size:
        raise MidusError(broken.format(""))
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.stop - entry.start != prod(entry.shape) * entry.dtype.itemsize:
            raise MidusError(f"{path} gives tensor {shown(name)!r} a wrong size; fetch it again")
        if entry.start != end:
            raise MidusError(
                f"{path} has tensor {shown(name)!r} over another one or after a hole; "
                "fetch it again"
            )
        end = entry.stop
    return entries


def _make_entry(path: Path, info: dict[str, Any], data: int, size: int) -> TensorEntry:
    """One row of a header, every number checked; ``ValueError`` or the like if it is none."""
    dtype_name, shape = info["dtype"], info["shape"]
    start, stop = info["data_offsets"]
    if not isinstance(dtype_name, str) or not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        raise ValueError("a tensor without type and shape")
    if not (is_whole(stop, 0, size - data) and is_whole(start, 0, stop)):
        raise ValueError("a tensor outside the file")
    if not all(is_whole(n, 0, _MAX_ELEMENTS) for n in shape) or (
        prod(n or 1 for n in shape) > _MAX_ELEMENTS  # an empty tensor has strides all the same
    ):
        raise ValueError("a tensor of a shape that cannot be")
    return TensorEntry(path, dtype_name, tuple(shape), data + start, data + stop)


def fsync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

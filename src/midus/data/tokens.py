"""Token folders: the format, and datasets of training sequences over it.

A token folder holds ``manifest.json`` and, for each split (``train``, ``held_out``, ``test``),
files ``train-00000.bin`` and so on of little-endian uint16 token ids, or uint32 where the
vocabulary has more than 65,536 entries. A file is one stream of documents, each ended by the EOS
token. Sequences are cut from it without gaps, and the tokens at its end that fill no sequence are
left out.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from midus.data.rows import MANIFEST_NAME
from midus.errors import MidusError

FORMAT = "midus-tokens"
VERSION = 1
SPLITS = ("train", "held_out", "test")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class TokenFolder:
    """A folder that `midus data build` wrote, checked against its manifest."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.manifest = _read_manifest(self.path)
        self.dtype = DTYPES[self.manifest["dtype"]]
        for split in SPLITS:
            for file in self.manifest["splits"].get(split, {}).get("files", []):
                self._check_file(file["name"], file["bytes"])

    def _check_file(self, name: str, num_bytes: int) -> None:
        path = self.path / name
        if not path.is_file():
            raise MidusError(f"{path} is missing; copy the folder again or build it again")
        if path.stat().st_size != num_bytes:
            raise MidusError(
                f"{path} has {path.stat().st_size:,} bytes and its manifest says {num_bytes:,}; "
                "copy the folder again or build it again"
            )

    def check_contents(
        self, track: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items
    ) -> None:
        """Reads every file and refuses one that is not what was written.

        Args:
            track: Wraps the loop over files in a progress bar.
        """
        files = [file for split in self.manifest["splits"].values() for file in split["files"]]
        for file in track(files, "reading tokens"):
            path = self.path / file["name"]
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != file["sha256"]:
                raise MidusError(
                    f"{path} is not what its manifest says (sha256 {digest[:12]}, not "
                    f"{file['sha256'][:12]}); copy the folder again or build it again"
                )

    @property
    def tokenizer_sha256(self) -> str:
        return str(self.manifest["tokenizer"]["sha256"])

    def num_tokens(self, split: str) -> int:
        """Tokens stored for a split, 0 where the folder has none."""
        return int(self.manifest["splits"].get(split, {}).get("tokens", 0))

    def files(self, split: str) -> list[Path]:
        """The files of a split, in order."""
        files = self.manifest["splits"].get(split, {}).get("files", [])
        return [self.path / file["name"] for file in files]


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
        is_ours = manifest["format"] == FORMAT and manifest["dtype"] in DTYPES
        version = manifest["version"]
        manifest["splits"]["train"]["files"], manifest["tokenizer"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MidusError(
            f"{path} is not a token folder (no usable {MANIFEST_NAME}); make one with: "
            "midus data build"
        ) from error
    if not is_ours or version != VERSION:
        raise MidusError(
            f"{path} is in format {manifest['format']} {version}, and this midus reads {FORMAT} "
            f"{VERSION}; build it again"
        )
    return dict(manifest)


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Sequences of one split of a token folder, read where they lie.

    Args:
        folder: The token folder, or its path.
        split: ``train``, ``held_out`` or ``test``.
        seq_len: Tokens in a sequence.
        max_tokens: Most tokens to use, from the start; default: all.
    """

    def __init__(
        self,
        folder: TokenFolder | str | Path,
        split: str,
        seq_len: int,
        max_tokens: int | None = None,
    ) -> None:
        folder = folder if isinstance(folder, TokenFolder) else TokenFolder(folder)
        self.seq_len = seq_len
        self.dtype = folder.dtype
        self.paths = folder.files(split)
        sizes = [path.stat().st_size // self.dtype.itemsize // seq_len for path in self.paths]
        self.ends = np.cumsum(sizes, dtype=np.int64)  # sequences up to the end of each file
        self.num_sequences = int(self.ends[-1]) if sizes else 0
        if max_tokens is not None:
            self.num_sequences = min(self.num_sequences, max_tokens // seq_len)
        if self.num_sequences == 0:
            raise MidusError(
                f"{folder.path} has {folder.num_tokens(split):,} {split} tokens to use, fewer than "
                f"one sequence of seq_len={seq_len}; add text or lower seq_len"
            )
        self._open: dict[int, np.ndarray[Any, Any]] = {}

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index < 0:
            index += self.num_sequences
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        file = int(np.searchsorted(self.ends, index, side="right"))
        start = (index - (int(self.ends[file - 1]) if file else 0)) * self.seq_len
        if file not in self._open:
            self._open[file] = np.memmap(self.paths[file], dtype=self.dtype, mode="r")
        ids = torch.from_numpy(self._open[file][start : start + self.seq_len].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def __getstate__(self) -> dict[str, Any]:
        # A worker maps the files itself; pickling a map would copy what it maps.
        return {**self.__dict__, "_open": {}}


class MixtureDataset(Dataset[dict[str, Tensor]]):
    """Sequences of several datasets in fixed proportions.

    Sequence i comes from the dataset that is furthest behind its share after i sequences (the first
    of equals), so every prefix holds the proportions to within one sequence. A dataset that runs
    out starts again.

    Args:
        datasets: What is mixed.
        weights: Share of each, relative to the others.
        num_sequences: Length of the mixture; default: as long as no dataset starts again.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float],
        num_sequences: int | None = None,
    ) -> None:
        if not datasets or len(datasets) != len(weights):
            raise MidusError(
                f"{len(datasets)} datasets and {len(weights)} weights do not match; "
                "give one weight a dataset"
            )
        if min(weights) <= 0:
            raise MidusError(f"weights={list(weights)} must all be above 0")
        self.datasets = list(datasets)
        lengths = [len(dataset) for dataset in datasets]
        chosen = _interleave(lengths, weights, num_sequences)
        self.chosen = np.array(chosen, dtype=np.uint16)
        # The how-manieth sequence of its dataset each one is.
        self.rank = np.empty(len(chosen), dtype=np.int64)
        for index, length in enumerate(lengths):
            places = np.flatnonzero(self.chosen == index)
            self.rank[places] = np.arange(len(places)) % length

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item: dict[str, Tensor] = self.datasets[self.chosen[index]][int(self.rank[index])]
        return item

    def repeats(self) -> list[float]:
        """How often each dataset is passed through, 1.0 for exactly once."""
        counts = np.bincount(self.chosen, minlength=len(self.datasets))
        return [float(count) / len(data) for count, data in zip(counts, self.datasets, strict=True)]


def _interleave(
    lengths: Sequence[int], weights: Sequence[float], num_sequences: int | None
) -> list[int]:
    total = sum(weights)
    shares = [weight / total for weight in weights]
    counts = [0] * len(lengths)
    chosen: list[int] = []
    sources = range(len(lengths))
    while num_sequences is None or len(chosen) < num_sequences:
        step = len(chosen) + 1
        # A difference in the last bits is rounding, not a deficit.
        behind = [round(shares[s] * step - counts[s], 9) for s in sources]
        pick = behind.index(max(behind))
        if num_sequences is None and counts[pick] == lengths[pick]:
            break
        counts[pick] += 1
        chosen.append(pick)
    return chosen

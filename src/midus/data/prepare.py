"""`prepare_text`: the training and held-out sequences of a run, from whatever its sources are.

Text is tokenised once a source and kept in the cache under a key of everything that decides the
bytes; token folders are used as they are.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch.utils.data import ConcatDataset

from midus.data.build import SHARD_TOKENS, build_tokens
from midus.data.encoding import DocumentEncoding, read_encoding
from midus.data.executors import Track, no_bar
from midus.data.options import DataOptions, SourceOptions
from midus.data.plan import shares_of
from midus.data.rows import hub_revision, is_hub_dataset, is_token_folder, list_files
from midus.data.tokens import VERSION, MixtureDataset, TokenDataset, TokenFolder
from midus.errors import MidusError


@dataclass(frozen=True)
class PreparedText:
    """What continual pre-training reads."""

    train: Any
    """Training sequences: a map-style dataset of ``input_ids`` and ``labels``."""
    held_out: Any | None
    """Held-out sequences, or None where there are none."""
    manifests: list[dict[str, Any]]
    """Manifest of every token folder in use."""
    num_train_tokens: int
    bad_rows: int
    """Rows of the sources that could not be used."""
    notes: list[str] = field(default_factory=list)
    """What the user should know: a source that is repeated, or too little held-out text."""

    @property
    def identity(self) -> str:
        """Stands for every token that may be read."""
        files = [
            [split, [file["sha256"] for file in facts["files"]]]
            for manifest in self.manifests
            for split, facts in sorted(manifest["splits"].items())
        ]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def prepare_text(
    options: DataOptions, tokenizer_source: str | Path, track: Track = no_bar
) -> PreparedText:
    """Tokenises what is not tokenised yet, and opens all of it.

    Args:
        options: Which text.
        tokenizer_source: Model whose tokenizer is used.
        track: Progress bar around an iterable, given with its description.
    """
    encoding = read_encoding(tokenizer_source)
    opener = _Opener(options, encoding, tokenizer_source, track)
    notes: list[str] = []
    weights = [source.weight for source in options.sources]
    num_sequences = None
    if options.max_tokens is not None:
        num_sequences = options.max_tokens // options.seq_len
        if num_sequences == 0:
            raise MidusError(
                f"max_tokens={options.max_tokens} is less than one sequence of "
                f"seq_len={options.seq_len}; raise max_tokens or lower seq_len"
            )
    held_out = 0.0 if options.eval_sources else options.held_out
    counts = _sequence_shares(num_sequences, weights)
    evals = shares_of(options.eval_tokens, weights)
    folders = [
        opener.open(source, count, held_out, share)
        for source, count, share in zip(options.sources, counts, evals, strict=True)
    ]
    train = _mix(folders, options, weights, num_sequences, notes)
    if options.eval_sources:
        eval_folders = opener.open_eval()
        held_out_set = _join(eval_folders, options, options.eval_sources, notes)
        if held_out_set is None:
            raise MidusError(
                f"eval_sources hold less than one sequence of seq_len={options.seq_len}; "
                "add text or lower seq_len"
            )
    else:
        eval_folders = []
        held_out_set = _join(folders, options, options.sources, notes) if held_out else None
    manifests = [folder.manifest for folder in (*folders, *eval_folders)]
    return PreparedText(
        train=train,
        held_out=held_out_set,
        manifests=manifests,
        num_train_tokens=len(train) * options.seq_len,
        bad_rows=sum(manifest["bad_rows"]["count"] for manifest in manifests),
        notes=notes,
    )


def _is_whole(folder: Path) -> bool:
    try:
        TokenFolder(folder)
    except MidusError:
        return False
    return True


@dataclass(frozen=True)
class _Opener:
    """Opens the token folder of a source, made in the cache where there is none."""

    options: DataOptions
    encoding: DocumentEncoding
    tokenizer_source: str | Path
    track: Track

    def open(
        self,
        source: SourceOptions,
        num_sequences: int | None,
        held_out: float,
        eval_tokens: int | None,
    ) -> TokenFolder:
        if is_token_folder(source.path):
            return self._checked(source)
        seq_len = self.options.seq_len
        max_tokens = None
        if num_sequences is not None:
            # What a file's end leaves over makes no sequence.
            num_files = num_sequences * seq_len // SHARD_TOKENS + 1
            max_tokens = (num_sequences + num_files) * seq_len
        settings: dict[str, Any] = {
            "max_tokens": max_tokens,
            "held_out": held_out,
            "eval_tokens": (eval_tokens or 0) + seq_len,
            "seed": self.options.seed,
        }
        source = replace(source, weight=1.0)
        revision = hub_revision(source) if is_hub_dataset(source) else None
        target = self._place(source, revision, settings)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The processes of one run ask at the same time: one builds, the others wait for it.
        with FileLock(f"{target}.lock"):
            if not _is_whole(target):
                shutil.rmtree(target, ignore_errors=True)  # in the cache, and of no use
                build_tokens([source], self.tokenizer_source, target, track=self.track, **settings)
        return TokenFolder(target)

    def open_eval(self) -> list[TokenFolder]:
        sources, seq_len = self.options.eval_sources, self.options.seq_len
        weights = [source.weight for source in sources]
        counts = _sequence_shares(max(1, self.options.eval_tokens // seq_len), weights)
        return [
            self.open(source, count, 0.0, 1) for source, count in zip(sources, counts, strict=True)
        ]

    def _checked(self, source: SourceOptions) -> TokenFolder:
        folder = TokenFolder(source.path)
        if folder.tokenizer_sha256 != self.encoding.sha256:
            other = folder.manifest["tokenizer"]["source"]
            raise MidusError(
                f"{source.path} was made with the tokenizer of {other}, which is not the one of "
                f"{self.tokenizer_source}; build it again with --tokenizer {self.tokenizer_source}"
            )
        return folder

    def _place(self, source: SourceOptions, revision: str | None, settings: dict[str, Any]) -> Path:
        from midus.models.sources import cache_folder

        cache = self.options.cache
        root = Path(cache).expanduser() if cache else cache_folder() / "tokens"
        facts: dict[str, Any] = {
            "version": VERSION,
            "source": asdict(source),
            "tokenizer": self.encoding.facts(),
            "settings": settings,
        }
        is_hub = is_hub_dataset(source)
        if not is_hub:
            stats = [(str(path.resolve()), path.stat()) for path in list_files(source)]
            facts["files"] = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
        if not is_hub:
            return root / key
        kept = sorted(root.glob(f"{key}-*/manifest.json"))
        if revision is None and kept:  # the hub does not answer: what was fetched before will do
            return kept[-1].parent
        return root / f"{key}-{revision or 'unknown'}"


def _sequence_shares(num_sequences: int | None, weights: Sequence[float]) -> list[int | None]:
    """Sequences each source may have to give: its share, rounded up."""
    if num_sequences is None:
        return [None] * len(weights)
    return [math.ceil(num_sequences * weight / sum(weights)) for weight in weights]


def _mix(
    folders: list[TokenFolder],
    options: DataOptions,
    weights: list[float],
    num_sequences: int | None,
    notes: list[str],
) -> MixtureDataset:
    datasets = [TokenDataset(folder, "train", options.seq_len) for folder in folders]
    if num_sequences is not None:
        # Once every source has been passed through there is nothing more to learn from.
        shares = [weight / sum(weights) for weight in weights]
        longest = max(len(data) / share for data, share in zip(datasets, shares, strict=True))
        num_sequences = min(num_sequences, round(longest))
    mixture = MixtureDataset(datasets, weights, num_sequences)
    for source, passes in zip(options.sources, mixture.repeats(), strict=True):
        if passes > 1:
            notes.append(f"{source.path} has too little text and is passed {passes:.2f} times")
    return mixture


def _join(
    folders: list[TokenFolder],
    options: DataOptions,
    sources: tuple[SourceOptions, ...],
    notes: list[str],
) -> Any | None:
    """Held-out sequences of all folders, each within its share of ``eval_tokens``."""
    shares = shares_of(options.eval_tokens, [source.weight for source in sources])
    datasets = []
    for source, folder, share in zip(sources, folders, shares, strict=True):
        split = "held_out" if folder.num_tokens("held_out") else "train"
        if split == "train" and sources is options.sources:
            notes.append(f"{source.path} has no held-out text")
            continue
        tokens = max(share or 0, options.seq_len)
        if folder.num_tokens(split) < options.seq_len:
            notes.append(
                f"{source.path} has {folder.num_tokens(split):,} held-out tokens, fewer than one "
                f"sequence of seq_len={options.seq_len}"
            )
            continue
        datasets.append(TokenDataset(folder, split, options.seq_len, tokens))
    return ConcatDataset(datasets) if datasets else None

"""What one build does, decided before it runs: which inputs, whose share, in how many parts.

Nothing here or in the plan depends on how many processes carry it out, so neither do the bytes.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from midus.data.documents import split_hash, split_limits
from midus.data.encoding import DocumentEncoding
from midus.data.options import SourceOptions
from midus.data.rows import hub_revision, is_hub_dataset, is_token_folder, list_files
from midus.errors import MidusError


@dataclass(frozen=True)
class Input:
    """One file of a source, or the stream of a hub dataset."""

    source: int
    """Index of its source."""
    path: str | None
    """The file; None for a hub dataset."""
    revision: str | None = None
    """Commit of a hub dataset, where the hub told it."""


@dataclass(frozen=True)
class Part:
    """What one task reads in one go: every ``num_stripes``-th row of an input."""

    index: int
    """Index of its input."""
    stripe: int
    num_stripes: int


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """A build, as every task of it sees it."""

    sources: tuple[SourceOptions, ...]
    inputs: tuple[Input, ...]
    encoding: DocumentEncoding
    max_tokens: int | None
    held_out: float
    eval_tokens: int
    seed: int
    shard_tokens: int
    by_weight: bool
    """Whether each source gives its share of the tokens, instead of all being one pool."""
    out: str
    overwrite: bool
    work: str = ""
    """Folder of everything in between; it is gone when the build has ended."""
    test: float = 0.0
    test_tokens: int = 262_144
    tasks: int = 1
    workers: int = 1
    bytes_per_token: int = 8
    """Text read for one wanted token: a guess that costs time if wrong, and changes no byte."""

    @property
    def is_surveyed(self) -> bool:
        """Whether documents are chosen before they are tokenised: some local text is left over."""
        return self.max_tokens is not None and any(item.path for item in self.inputs)

    @property
    def work_folder(self) -> Path:
        return Path(self.work)

    def group(self, source: int) -> int:
        """Sources of one group share one number of tokens."""
        return source if self.by_weight else 0

    @property
    def splits(self) -> tuple[str, ...]:
        """What the folder holds; a test split where one is asked for."""
        return ("train", "held_out", "test") if self.test else ("train", "held_out")

    @property
    def limits(self) -> tuple[int, int]:
        """Hashes at which one split ends and the next begins."""
        return split_limits(self.held_out, self.test)

    def split_hash(self, text: str) -> int:
        """What decides which split a text is in."""
        return split_hash(text, bool(self.test))

    def wanted(self, split: str) -> dict[int, int | None]:
        """Tokens wanted of each group, None for all there are."""
        totals = {
            "train": self.max_tokens,
            "held_out": self.eval_tokens,
            "test": self.test_tokens,
        }
        total = totals[split]
        if not self.by_weight:
            return {0: total}
        shares = shares_of(total, [source.weight for source in self.sources])
        return dict(enumerate(shares))

    def parts(self, rank: int) -> list[Part]:
        """What one task reads.

        Inputs are split into stripes where there are fewer of them than tasks: reading a file
        several times costs far less than tokenising it.
        """
        num_stripes = -(-self.tasks // len(self.inputs))
        parts = []
        for index, item in enumerate(self.inputs):
            # The first documents of a stream can only be taken by one reader.
            stripes = 1 if item.path is None and self.max_tokens is not None else num_stripes
            parts += [Part(index, stripe, stripes) for stripe in range(stripes)]
        return parts[rank :: self.tasks]

    def with_work(self, work: Path) -> "BuildPlan":
        return replace(self, work=str(work))


def shares_of(total: int | None, weights: list[float]) -> list[int | None]:
    """A total split by weight into whole numbers that add up to it."""
    if total is None:
        return [None] * len(weights)
    whole = sum(weights)
    ends = [round(total * sum(weights[: i + 1]) / whole) for i in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def find_inputs(sources: tuple[SourceOptions, ...], pooled: bool) -> tuple[Input, ...]:
    """The inputs of all sources, refusing what a build cannot read.

    Args:
        sources: Where the text comes from.
        pooled: Whether the sources share one number of tokens, which a stream cannot do.
    """
    inputs: list[Input] = []
    for index, source in enumerate(sources):
        if is_token_folder(source.path):
            raise MidusError(
                f"{source.path} is a token folder already; name it as a source of a run instead"
            )
        if not is_hub_dataset(source):
            inputs += [Input(index, str(path)) for path in list_files(source)]
        elif pooled and len(sources) > 1:
            raise MidusError(
                f"{source.path} is a stream, which has no size to share tokens by; "
                "give the sources weights, such as --weights 0.9,0.1"
            )
        else:
            inputs.append(Input(index, None, hub_revision(source)))
    return tuple(inputs)

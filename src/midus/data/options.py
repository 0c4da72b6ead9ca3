"""Which text a run reads: sources, their weights, and what is kept apart for evaluation."""

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from midus.errors import MidusError

ROW_FORMATS = ("auto", "alpaca", "chat", "prompt_completion")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """One source of text or of instruction rows."""

    path: str
    """A local file, folder or pattern, a hub dataset id, or a folder of `midus data build`."""
    name: str | None = None
    """Configuration of a hub dataset, such as CC-MAIN-2024-51."""
    split: str = "train"
    """Split of a hub dataset."""
    files: str | None = None
    """Patterns of files inside a hub dataset, with commas; default: all of its split."""
    text_field: str = "text"
    """Field of a row that holds its text."""
    weight: float = 1.0
    """Share of this source in the mixture, relative to the others' weights."""

    def __post_init__(self) -> None:
        """Check what can be checked without reading anything."""
        for name in ("path", "split", "text_field"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise MidusError(f"{name}={value!r} of a source must be a text that is not empty")
        for name in ("name", "files"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise MidusError(f"{name}={value!r} of source {self.path} must be a text")
        if not _is_number(self.weight) or not 0 < self.weight < float("inf"):
            raise MidusError(
                f"weight={self.weight!r} of source {self.path} must be a number above 0; "
                "leave the source out instead of weighing it 0"
            )

    @classmethod
    def from_dict(cls, values: "str | dict[str, Any] | SourceOptions") -> "SourceOptions":
        """A source from what a YAML file holds: its path, or its options by name."""
        if isinstance(values, SourceOptions):
            return values
        if isinstance(values, str):
            return cls(path=values)
        _check_keys(cls, values)
        if "path" not in values:
            raise MidusError(f"source {values!r} has no path; add path: FILE, FOLDER or HUB_ID")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What a run is trained and evaluated on."""

    sources: tuple[SourceOptions, ...]
    """Where the training text or rows come from; a path alone will do."""
    eval_sources: tuple[SourceOptions, ...] = ()
    """Where the evaluation text comes from; default: a held-out share of the sources."""
    held_out: float = 0.01
    """Share of documents kept apart, chosen by their content, without eval_sources; 0: none."""
    seq_len: int = 2048
    """Tokens in one training sequence."""
    max_tokens: int | None = None
    """Most training tokens of all sources together, shared by weight; default: all of them."""
    eval_tokens: int = 262_144
    """Most held-out tokens of all sources together."""
    row_format: str = "auto"
    """Form of fine-tuning rows: auto, alpaca, chat or prompt_completion."""
    cache: str | None = None
    """Where tokenised text is kept; default: tokens in midus' cache folder."""
    seed: int = 0
    """Seed of the order of the documents."""

    def __post_init__(self) -> None:
        """Check what can be checked without reading anything."""
        for name in ("sources", "eval_sources"):
            object.__setattr__(self, name, _sources(name, getattr(self, name)))
        if not self.sources:
            raise MidusError("sources is empty; name at least one file, folder or hub dataset")
        check_share("held_out", self.held_out)
        check_whole("seq_len", self.seq_len, 2)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_whole("eval_tokens", self.eval_tokens, 1)
        check_whole("seed", self.seed, 0)
        if self.row_format not in ROW_FORMATS:
            raise MidusError(
                f"row_format={self.row_format!r} is unknown; choose one of {', '.join(ROW_FORMATS)}"
            )
        if self.cache is not None and not isinstance(self.cache, str):
            raise MidusError(f"cache={self.cache!r} must be a folder")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DataOptions":
        """Options from what a YAML file holds; a source may be a path alone."""
        _check_keys(cls, values)
        if "sources" not in values:
            raise MidusError("data has no sources; name at least one file, folder or hub dataset")
        return cls(**values)


def check_whole(name: str, value: Any, smallest: int) -> None:
    """Refuses what is not a whole number from ``smallest`` to 2**48."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not smallest <= value <= 2**48:
        raise MidusError(f"{name}={value!r} must be a whole number from {smallest} to {2**48:,}")


def check_share(name: str, value: Any) -> None:
    """Refuses what is not a share of documents that leaves some of them."""
    if not _is_number(value) or not 0 <= value < 1:
        raise MidusError(f"{name}={value!r} must be a share from 0 to below 1, such as 0.01")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _sources(name: str, values: Any) -> tuple[SourceOptions, ...]:
    if isinstance(values, str | dict | SourceOptions):
        values = (values,)
    if not isinstance(values, list | tuple):
        raise MidusError(f"{name}={values!r} must be a path or a list of sources")
    return tuple(SourceOptions.from_dict(value) for value in values)


def _check_keys(cls: type[Any], values: Any) -> None:
    if not isinstance(values, dict):
        raise MidusError(f"{values!r} must be options by name for {cls.__name__}")
    known = [field.name for field in fields(cls)]
    for key in values:
        if key not in known:
            raise MidusError(
                f"unknown option {key!r} for {cls.__name__}; known options: {', '.join(known)}"
            )

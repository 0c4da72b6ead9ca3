"""Text for training: read, tokenised once, kept in memory-mapped files.

Continual pre-training reads documents (`documents`), which a datatrove pipeline turns into a folder
of tokens (`build`, `steps`, `merging`); `tokens` reads and mixes such folders, and
`prepare` does all of it for a run. Fine-tuning reads rows of instructions (`instructions`).

Reading a token folder needs numpy and torch only; names here are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midus.data.build import build_tokens as build_tokens
    from midus.data.instructions import PreparedRows as PreparedRows
    from midus.data.instructions import read_instructions as read_instructions
    from midus.data.options import DataOptions as DataOptions
    from midus.data.options import SourceOptions as SourceOptions
    from midus.data.prepare import PreparedText as PreparedText
    from midus.data.prepare import prepare_text as prepare_text
    from midus.data.tokens import MixtureDataset as MixtureDataset
    from midus.data.tokens import TokenDataset as TokenDataset
    from midus.data.tokens import TokenFolder as TokenFolder

_HOMES = {
    "DataOptions": "options",
    "MixtureDataset": "tokens",
    "PreparedRows": "instructions",
    "PreparedText": "prepare",
    "SourceOptions": "options",
    "TokenDataset": "tokens",
    "TokenFolder": "tokens",
    "build_tokens": "build",
    "prepare_text": "prepare",
    "read_instructions": "instructions",
}
__all__ = [
    "DataOptions",
    "MixtureDataset",
    "PreparedRows",
    "PreparedText",
    "SourceOptions",
    "TokenDataset",
    "TokenFolder",
    "build_tokens",
    "prepare_text",
    "read_instructions",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

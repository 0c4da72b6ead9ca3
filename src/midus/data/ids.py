"""The tokens of a text, for whatever reads one text instead of a corpus."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus.data.documents import file_documents
from midus.data.options import SourceOptions
from midus.data.rows import BadRows, list_files
from midus.errors import MidusError

if TYPE_CHECKING:
    from torch import Tensor

# More than the characters of a token in any text but runs of blanks.
_CHARACTERS = 32


def read_ids(path: str | Path, tokenizer: Any, max_tokens: int | None = None) -> "Tensor":
    """The first tokens of a text file or of a file of rows with a field ``text``: ``[T]``.

    As in training, the EOS token follows every document, where the tokenizer has one. A row that
    cannot be read is refused: a corpus can spare it, a measurement cannot.

    Args:
        path: A file, folder or pattern, of the kinds `midus data build` reads.
        tokenizer: The model's tokenizer.
        max_tokens: How many tokens to read at most; None: all.
    """
    import torch

    ids: list[int] = []
    bad_rows = BadRows()
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for file in list_files(SourceOptions(path=str(path))):
        for text, _ in file_documents(file, "text", bad_rows):
            _refuse(bad_rows)
            ids += _encode(tokenizer, text, None if max_tokens is None else max_tokens - len(ids))
            ids += [] if ids[-1:] == end else end
            if max_tokens is not None and len(ids) >= max_tokens:
                return torch.tensor(ids[:max_tokens])
        _refuse(bad_rows)
    if not ids:
        raise MidusError(f"{path} holds no text; give a text, or rows with a field 'text'")
    return torch.tensor(ids)


def _encode(tokenizer: Any, text: str, wanted: int | None) -> list[int]:
    """At least the wanted tokens of a text, without encoding a whole book for a page of it."""
    if wanted is not None and len(text) > wanted * _CHARACTERS:
        ids: list[int] = tokenizer(text[: wanted * _CHARACTERS], verbose=False).input_ids
        if len(ids) >= wanted:
            return ids
    return list(tokenizer(text, verbose=False).input_ids)


def _refuse(bad_rows: BadRows) -> None:
    if bad_rows.named:
        _, where, reason = bad_rows.named[0]
        raise MidusError(f"{where} cannot be read: {reason}; mend the row or give plain text")

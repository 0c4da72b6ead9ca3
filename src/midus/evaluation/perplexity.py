"""Perplexity of a model on any text, in windows that do not overlap."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from midus.errors import MidusError
from midus.evaluation.verify import Track, to_perplexity
from midus.models.fitting import refuse_too_long

_ROWS_AT_ONCE = 512
_WINDOW = 1024


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text."""

    perplexity: float
    """exp of the mean negative log-likelihood of a token, given the window before it."""
    num_tokens: int
    """Tokens that were predicted: all but the first of each window."""
    num_windows: int
    window: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def perplexity(
    model: Any,
    ids: Tensor,
    *,
    window: int | None = None,
    track: Track = lambda items, _: items,
) -> Perplexity:
    """Reads a text in whole windows; what is left over at its end is not read.

    Args:
        model: In evaluation mode, on its device.
        ids: The text's tokens.
        window: Tokens a forward pass sees; default: 1,024, or the model's positions if fewer.
        track: Wraps the windows in a progress bar.
    """
    if window is None:
        window = min(_WINDOW, model.config.max_position_embeddings)
    if window < 2:
        raise MidusError(f"window={window} predicts nothing; give at least 2 tokens")
    refuse_too_long(window, model.config, "window")
    if len(ids) < window:
        raise MidusError(
            f"the text has {len(ids)} tokens, less than one window of {window}; give a longer "
            "text or a smaller --window"
        )
    windows = [piece for piece in ids.split(window) if len(piece) == window]
    total = sum(_nll(model, piece) for piece in track(windows, "reading"))
    num_tokens = len(windows) * (window - 1)
    return Perplexity(
        perplexity=to_perplexity(total / num_tokens),
        num_tokens=num_tokens,
        num_windows=len(windows),
        window=window,
    )


@torch.inference_mode()
def _nll(model: Any, piece: Tensor) -> float:
    piece = piece.to(model.device)
    logits = model(piece[None], use_cache=False).logits[0, :-1]  # [T - 1, vocabulary]
    pairs = zip(logits.split(_ROWS_AT_ONCE), piece[1:].split(_ROWS_AT_ONCE), strict=True)
    return sum(cross_entropy(rows.double(), ids, reduction="sum").item() for rows, ids in pairs)

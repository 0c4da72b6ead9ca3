"""Compares two whole models on a text, one after the other: logits, KL divergence, perplexity."""

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from midus.errors import MidusError
from midus.models.configuration import read_config
from midus.models.loading import load_model, load_tokenizer
from midus.models.record import is_delta
from midus.models.sources import resolve_source

Track = Callable[[Iterable[Any], str], Iterable[Any]]
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Verification:
    """How far the second model is from the first."""

    dtype: str
    device: str
    num_tokens: int
    max_abs_logit_diff: float
    mean_kl: float
    """KL(base || up-scaled) in nats, averaged over positions."""
    base_perplexity: float
    upscaled_perplexity: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sample_text() -> str:
    """The text used when none is given: the opening of a public-domain novel."""
    return files("midus").joinpath("assets", "sample.txt").read_text(encoding="utf-8")


def verify(
    base: str | Path,
    upscaled: str | Path,
    text: str | None = None,
    *,
    max_tokens: int = 1024,
    window: int = 512,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    track: Track = lambda items, _: items,
) -> Verification:
    """Runs both models on the text, in one type and attention implementation.

    Args:
        base: The base, as ``load_model`` takes it.
        upscaled: The grown model; a delta is loaded on ``base``.
        text: Text to read; default: the packaged sample.
        max_tokens: How much of it to read.
        window: Tokens a forward pass sees.
        dtype: Type of both models; default: the base's.
        device: Where to run; default: the GPU if there is one.
        track: Wraps loops in a progress bar.
    """
    tokenizer = load_tokenizer(base)
    ids = tokenizer(text if text is not None else sample_text(), return_tensors="pt").input_ids
    _refuse_foreign_tokens(ids, base)
    _refuse_foreign_tokens(ids, upscaled)
    windows = [piece for piece in ids[0, :max_tokens].split(window) if len(piece) > 1]
    if not windows:
        raise MidusError("the text has fewer than two tokens; give a longer one")
    with tempfile.TemporaryDirectory(prefix="midus-verify-") as scratch:
        # The base's logits wait on disk, so that only one model is in memory.
        model = load_model(base, dtype=dtype, device=device)
        dtype, device = model.dtype, str(model.device)
        base_nll = 0.0
        for i, piece in enumerate(track(windows, "running the base")):
            logits = _logits(model, piece)
            base_nll += _nll(logits, piece)
            save_file({"logits": logits}, Path(scratch) / f"{i}.safetensors")
        del model
        model = load_model(upscaled, base=_base_for(upscaled, base), dtype=dtype, device=device)
        nll = divergence = largest = 0.0
        for i, piece in enumerate(track(windows, "running the up-scaled model")):
            logits = _logits(model, piece)
            reference = load_file(Path(scratch) / f"{i}.safetensors")["logits"]
            if logits.shape != reference.shape:
                raise MidusError(
                    f"{upscaled} has a vocabulary of {logits.shape[-1]}, its base of "
                    f"{reference.shape[-1]}; compare models with one tokenizer"
                )
            nll += _nll(logits, piece)
            largest = max(largest, _max_abs_diff(reference, logits))
            divergence += _kl(reference, logits)
    num_predicted = sum(len(piece) - 1 for piece in windows)
    num_tokens = sum(len(piece) for piece in windows)
    return Verification(
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        num_tokens=num_tokens,
        max_abs_logit_diff=largest,
        mean_kl=divergence / num_tokens,
        base_perplexity=to_perplexity(base_nll / num_predicted),
        upscaled_perplexity=to_perplexity(nll / num_predicted),
    )


def _refuse_foreign_tokens(ids: Tensor, source: str | Path) -> None:
    vocab_size = read_config(resolve_source(source)).vocab_size
    if ids.numel() and int(ids.max()) >= vocab_size:
        raise MidusError(
            f"{source} has a vocabulary of {vocab_size}, and the base's tokenizer gives token "
            f"{int(ids.max())}; compare models with one tokenizer"
        )


def to_perplexity(mean_nll: float) -> float:
    """exp, or infinity where it is too large for a number."""
    try:
        return math.exp(mean_nll)
    except OverflowError:
        return math.inf


def _base_for(upscaled: str | Path, base: str | Path) -> str | Path | None:
    config = read_config(resolve_source(upscaled))
    return base if is_delta(config) else None


@torch.no_grad()
def _logits(model: Any, piece: Tensor) -> Tensor:
    output = model(piece.unsqueeze(0).to(model.device), use_cache=False)
    logits: Tensor = output.logits[0].cpu()  # [T, vocabulary]
    return logits


def _max_abs_diff(reference: Tensor, logits: Tensor) -> float:
    # NaN must not pass for equal.
    difference = (logits.double() - reference.double()).abs().max().item()
    return math.inf if math.isnan(difference) else difference


def _nll(logits: Tensor, piece: Tensor) -> float:
    total = 0.0
    for start in range(0, len(piece) - 1, _ROWS_AT_ONCE):
        rows = logits[start : min(start + _ROWS_AT_ONCE, len(piece) - 1)].double()
        targets = piece[start + 1 : start + 1 + len(rows)]
        total += torch.nn.functional.cross_entropy(rows, targets, reduction="sum").item()
    return total


def _kl(reference: Tensor, logits: Tensor) -> float:
    total = 0.0
    for p, q in zip(reference.split(_ROWS_AT_ONCE), logits.split(_ROWS_AT_ONCE), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum().item()
    return total

"""How well a model predicts sequences: many at a time, with the loss that training uses."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from midus.studies.material import Text
from midus.training.options import TrainOptions


def computing(options: TrainOptions, device: torch.device) -> AbstractContextManager[Any]:
    """The arithmetic of a run's precision, as `midus train` has it."""
    if device.type == "cuda" and options.precision == "mixed":
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients, while open."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def mean_loss(model: Any, sequences: Tensor, options: TrainOptions, batch_size: int) -> float:
    """Mean over all predicted tokens: all but the first of each sequence.

    Args:
        model: A model whose loss is chunked, on its device.
        sequences: Token ids ``[S, T]``.
        options: Of the run; precision counts.
        batch_size: Sequences at a time.
    """
    total = torch.zeros((), dtype=torch.float64, device=sequences.device)
    with evaluating(model), computing(options, sequences.device):
        for batch in sequences.split(batch_size):
            ids = batch.long()
            total += model(input_ids=ids, labels=ids, num_items_in_batch=1).loss.double()
    return total.item() / (sequences.shape[0] * (sequences.shape[1] - 1))


def score(loss: float) -> dict[str, float | None]:
    """A loss with its perplexity; None where they are no numbers any more."""
    if not math.isfinite(loss) or loss > 700:
        return {"loss": None, "perplexity": None}
    return {"loss": loss, "perplexity": math.exp(loss)}


def score_text(
    model: Any, text: Text, options: TrainOptions, batch_size: int, device: torch.device
) -> dict[str, float | int | None]:
    """Perplexity of a text a token and a word, in whole windows of the run's ``seq_len``.

    A word's is ``exp(mean loss * tokens / words)``: the first token of a window, which nothing
    predicts, counts like the mean of the others.
    """
    length = min(options.data.seq_len, len(text.ids))
    num = len(text.ids) // length
    windows = text.ids[: num * length].view(num, length).to(device)
    loss = mean_loss(model, windows, options, batch_size)
    word = score(loss * len(text.ids) / text.num_words)["perplexity"]
    return {**score(loss), "word_perplexity": word, "tokens": num * (length - 1)}

"""What blocks of a model see while it reads some tokens, by hooks that go again."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from midus.training.controls import causal_lm


@torch.no_grad()
def read_tokens(model: Any, hooks: Sequence[RemovableHandle], batches: Iterable[Tensor]) -> None:
    """Runs tokens through a model as in evaluation, without its head, and removes the hooks.

    Args:
        model: A causal language model, with or without adapters.
        hooks: Those that listen.
        batches: Token ids ``[B, T]``.
    """
    inner = causal_lm(model)
    was_training = inner.training
    inner.eval()
    try:
        for batch in batches:
            inner.model(input_ids=batch.to(inner.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        inner.train(was_training)

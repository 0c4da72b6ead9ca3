"""Cross-entropy that never holds all logits: head and loss together, some tokens at a time.

With a vocabulary of 128k the logits of 8,192 tokens in float32 are 4 GB, and their gradient another
4. Here a chunk's gradient is taken while its logits are there, and both are dropped.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from midus.ops import cross_entropy_

IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024, softcap: float | None = None
) -> Tensor:
    """The sum over tokens of ``-log softmax(hidden @ weight.T)[target]``.

    Args:
        hidden: ``[T, D]``.
        weight: ``[vocabulary, D]``.
        targets: ``[T]``; -100 is left out.
        chunk: Tokens at a time.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, as in Gemma 2.
    """
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch
        hidden, weight, targets, chunk, softcap
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward makes the gradients, chunk by chunk; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        softcap: float | None,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        for start in range(0, len(hidden), chunk):
            rows, wanted = hidden[start : start + chunk], targets[start : start + chunk]
            logits = F.linear(rows, weight)  # [chunk, vocabulary]
            if not (needs_hidden or needs_weight):
                capped = _cap(logits.to(wide), softcap)
                loss += F.cross_entropy(capped, wanted, ignore_index=IGNORED, reduction="sum")
                continue
            if softcap is None:
                loss += cross_entropy_(logits, wanted, IGNORED)
                grad = logits
            else:
                grad = _cap(logits.to(wide), softcap)
                slope = 1 - (grad / softcap).square()
                loss += cross_entropy_(grad, wanted, IGNORED)
                grad = grad.mul_(slope).to(rows.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + chunk] = grad @ weight.to(grad.dtype)
            if grad_weight is not None:
                grad_weight += (grad.T @ rows).to(wide)
        ctx.save_for_backward(
            grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        )
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors
        ]
        return *grads, None, None, None


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def use_chunked_loss(model: Any, chunk: int) -> None:
    """Lets the model compute its loss in chunks; with labels its output has no logits.

    The model's own ``forward`` calls its own head with the targets, so that whatever wraps either
    (data parallelism, sharding, compilation) sees the calls it expects. Without labels nothing
    changes.

    Args:
        model: A causal language model with ``model`` and ``lm_head``.
        chunk: Tokens whose logits are in memory at a time.
    """
    plain, plain_head = model.forward, model.lm_head.forward
    softcap = getattr(model.config, "final_logit_softcapping", None)

    def head(self: Any, hidden: Tensor, targets: Tensor | None = None) -> Any:
        if targets is None:
            return plain_head(hidden)
        return linear_cross_entropy(
            hidden.flatten(0, 1), self.weight, targets.flatten(), chunk, softcap
        )

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        if labels is None:
            return plain(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
        kwargs["use_cache"] = False
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state  # [B, T, D]
        # Token t predicts token t + 1.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        total = self.lm_head(hidden, targets)
        count = num_items_in_batch
        if count is None:
            count = (targets != IGNORED).sum().clamp_min(1)
        elif torch.is_tensor(count):
            count = count.to(total.device)
        return CausalLMOutputWithPast(loss=total / count)

    model.lm_head.forward = types.MethodType(head, model.lm_head)
    model.forward = types.MethodType(forward, model)

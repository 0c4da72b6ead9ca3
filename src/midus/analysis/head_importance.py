"""Gradient head importance IS_h: how much of the loss goes through one attention head.

Paper, "Head-importance concentration under HML":
``IS_h = E[ | sum_t a_{h,t} . dl/da_{h,t} | ]``, the mean over examples of the derivative of an
example's loss by a gate on the head. The paper does not say whether the loss is summed or averaged
over the continuation's tokens; summed is the default here, the likelihood of the whole answer.

``reduction="token"`` puts the absolute value around each token and divides as the code of Bansal et
al. (2023) does; their numbers are this with ``loss="mean"``. ``layer_norm`` is that of Michel et
al. (2019).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from midus.analysis.examples import EncodedExample, Example, encode_examples
from midus.errors import MidusError
from midus.models.families import find_family

Track = Callable[[Iterable[Any], str], Iterable[Any]]
Reduction = Literal["example", "token"]
Loss = Literal["sum", "mean"]
REDUCTIONS: tuple[Reduction, ...] = ("example", "token")
LOSSES: tuple[Loss, ...] = ("sum", "mean")
_IGNORED = -100


def head_importance(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    reduction: Reduction = "example",
    loss: Loss = "sum",
    layer_norm: bool = False,
    batch_size: int = 1,
    track: Track = lambda items, _: items,
) -> Tensor:
    """IS_h of every query head of every block, ``[L, H]`` in float64 on the CPU.

    A head's output is what its block's output projection reads; in a memory block without one it
    is a', what the memory reads, and a bypass of attention where there is one. The model comes back
    as it was.

    Args:
        model: A causal language model of a supported family, grown or not.
        tokenizer: Its tokenizer.
        examples: Contexts and right continuations.
        reduction: ``example`` is the paper's form. ``token`` sums ``|a_{h,t} . dl/da_{h,t}|`` over
            all tokens and divides by the number of tokens read, the last block's by the number of
            continuation tokens: no other token of that block reaches the loss.
        loss: Whether an example's loss is the ``sum`` or the ``mean`` over its continuation.
        layer_norm: Divide each block's scores by their L2 norm over heads.
        batch_size: Examples of one pass; the scores do not depend on it.
        track: Wraps the loop in a progress bar.
    """
    _check(reduction, loss, batch_size, len(examples))
    find_family(model.config.model_type)
    encoded = encode_examples(
        examples, tokenizer, getattr(model.config, "max_position_embeddings", None)
    )
    _refuse_foreign_tokens(encoded, model)
    batches = [encoded[i : i + batch_size] for i in range(0, len(encoded), batch_size)]
    total: Tensor | float = 0.0
    with _head_outputs(model) as outputs:
        for batch in track(batches, "head importance"):
            scores = []
            for dots in _dot_products(model, batch, loss, outputs):  # [B, T, H]
                reached = dots.abs() if reduction == "token" else dots.sum(1).abs()
                scores.append(reached.flatten(0, -2).sum(0))
            total = total + torch.stack(scores)  # [L, H]
    assert isinstance(total, Tensor)
    if not total.isfinite().all():
        layer = int((~total.isfinite()).any(1).nonzero()[0])
        raise MidusError(
            f"the importance of block {layer} is not finite in {model.dtype}; try float32"
        )
    importance = total / _divisors(encoded, reduction, len(total))
    if layer_norm:
        importance = importance / (importance.norm(dim=1, keepdim=True) + 1e-20)
    return importance


def _check(reduction: str, loss: str, batch_size: int, num_examples: int) -> None:
    for name, value, known in (("reduction", reduction, REDUCTIONS), ("loss", loss, LOSSES)):
        if value not in known:
            raise MidusError(f"{name}={value!r} is unknown; choose {' or '.join(known)}")
    if batch_size < 1:
        raise MidusError(f"batch_size={batch_size} must be at least 1")
    if num_examples < 1:
        raise MidusError("there are no examples to measure on; give at least one")


def _refuse_foreign_tokens(encoded: list[EncodedExample], model: Any) -> None:
    largest = max(max(example.ids) for example in encoded)
    vocab_size = model.get_input_embeddings().num_embeddings
    if largest >= vocab_size:
        raise MidusError(
            f"the tokenizer gives token {largest} and the model has a vocabulary of {vocab_size}; "
            "use the model's own tokenizer"
        )


def _divisors(encoded: list[EncodedExample], reduction: str, num_layers: int) -> Tensor:
    if reduction == "example":
        return torch.full((num_layers, 1), len(encoded), dtype=torch.float64)
    num_read = sum(len(example.ids) - 1 for example in encoded)
    num_targets = sum(len(example.ids) - example.num_context for example in encoded)
    counts = [*[num_read] * (num_layers - 1), num_targets]
    return torch.tensor(counts, dtype=torch.float64).unsqueeze(1)


@contextmanager
def _head_outputs(model: Any) -> Iterator[dict[int, Tensor]]:
    """Head outputs by block, filled by each pass inside; parameters are frozen meanwhile."""
    outputs: dict[int, Tensor] = {}

    def keeper(layer: int) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
        def keep(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            attended: Tensor = args[0]  # [B, T, H * E]
            if not attended.requires_grad:
                # With all parameters frozen, the first block's heads are where the graph begins.
                attended = attended.detach().requires_grad_()
            outputs[layer] = attended
            return (attended, *args[1:])

        return keep

    trainable = [p for p in model.parameters() if p.requires_grad]
    modes = [(module, module.training) for module in model.modules()]
    hooks = [
        block.self_attn.o_proj.register_forward_pre_hook(keeper(layer))
        for layer, block in enumerate(model.model.layers)
    ]
    try:
        model.eval()
        for parameter in trainable:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield outputs
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trainable:
            parameter.requires_grad_(True)
        for module, training in modes:
            module.training = training


def _dot_products(
    model: Any, batch: list[EncodedExample], loss: str, outputs: dict[int, Tensor]
) -> Iterator[Tensor]:
    """``a_{h,t} . dl/da_{h,t}`` of each block in turn, ``[B, T, H]`` in float64 on the CPU.

    Rows are padded at their end, where no token of theirs looks, so no mask is needed and the
    padding's gradient is exactly zero. The losses of the rows are added: each row's gradient is
    that of its own loss.
    """
    outputs.clear()
    # An example's last token is only predicted.
    length = max(len(example.ids) for example in batch) - 1
    first = min(example.num_context for example in batch) - 1
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    targets = torch.full((len(batch), length), _IGNORED)
    for row, example in enumerate(batch):
        tokens = torch.tensor(example.ids)
        ids[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, example.num_context - 1 : len(tokens) - 1] = tokens[example.num_context :]
    targets = targets[:, first:].to(model.device)
    logits = model(
        ids.to(model.device),
        use_cache=False,
        logits_to_keep=torch.arange(first, length, device=model.device),
    ).logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    nll = F.cross_entropy(
        logits.to(wide).transpose(1, 2), targets, ignore_index=_IGNORED, reduction="none"
    ).sum(1)  # [B]
    if loss == "mean":
        nll = nll / (targets != _IGNORED).sum(1)
    layers = sorted(outputs)
    gradients = torch.autograd.grad(nll.sum(), [outputs[layer] for layer in layers])
    for layer, gradient in zip(layers, gradients, strict=True):
        products = outputs[layer].detach().to(wide) * gradient.to(wide)
        num_heads = model.config.num_attention_heads
        yield products.unflatten(-1, (num_heads, -1)).sum(-1).cpu().double()
    outputs.clear()

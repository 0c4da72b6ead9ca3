"""A_h and Y_h of a real model: what one memory block retrieves on a text, and what it should write.

Paper, Section 4.3. A_h collects a head's Top-k weights, a row a token. The paper does not say where
targets come from; here Y_h is the first-order target: the negative gradient of the language-model
loss with respect to the head's slice of the correction, the direction in which a small correction
lowers the loss most. All heads' targets together are scaled to Frobenius norm 1.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from midus.analysis.slots import check_memory
from midus.errors import MidusError
from midus.memory.hive import HiveValues
from midus.models.record import inserted_positions

Track = Callable[[Iterable[Any], str], Iterable[Any]]
# Of the [N, N] matrix that the shared bank is solved with.
_MOST_BYTES = 2e9


@dataclass(frozen=True)
class BlockRetrieval:
    """Fixed retrieval and targets of one memory block."""

    block: int
    """Its index in the final stack."""
    matrix: Tensor
    """A_h, ``[H, T, N]``, without the slots that no head reads: a bank's rows there do nothing."""
    target: Tensor
    """Y_h, ``[H, T, O]``."""
    latent_dim: int | None
    """Width of its HIVE table (paper: r), if it has one."""


def middle_block(config: Any) -> int:
    """Final index of the middle memory block."""
    check_memory(config)
    positions = inserted_positions(config)
    return positions[len(positions) // 2]


def collect_retrieval(
    model: Any,
    ids: Tensor,
    block: int | None = None,
    *,
    window: int = 512,
    track: Track = lambda items, _: items,
) -> BlockRetrieval:
    """Reads a text and keeps what one memory block retrieves and what the loss asks of it.

    Args:
        model: A model with memory blocks, in evaluation mode.
        ids: Tokens of the text ``[T + 1]``; the last one is predicted only.
        block: Final index of a memory block; default: the middle one.
        window: Tokens a forward pass sees; at most as many as the model can.
        track: Wraps the loop in a progress bar.
    """
    check_memory(model.config, block)
    block = middle_block(model.config) if block is None else block
    _check_ids(ids, model.config.vocab_size)
    window = min(window, getattr(model.config, "max_position_embeddings", None) or window)
    # Windows overlap by a token: the last one of each is read by none of its rows.
    pieces = [ids[start : start + window + 1] for start in range(0, len(ids) - 1, window)]
    memory = model.model.layers[block].memory
    slot_idx, weights, target = zip(
        *(_read_window(model, memory, piece) for piece in track(pieces, "reading the text")),
        strict=True,
    )
    values = getattr(memory, "values", None)
    return BlockRetrieval(
        block=block,
        matrix=_retrieval_matrix(torch.cat(slot_idx), torch.cat(weights)),
        target=_scaled(torch.cat(target), model.dtype),
        latent_dim=values.latent_values.shape[1] if isinstance(values, HiveValues) else None,
    )


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    if len(ids) < 2:
        raise MidusError("the text has fewer than two tokens; give a longer one")
    if int(ids.max()) >= vocab_size:
        raise MidusError(
            f"the tokenizer gives token {int(ids.max())}, and the model has a vocabulary of "
            f"{vocab_size}; use the model's own tokenizer"
        )


def _read_window(model: Any, memory: Any, piece: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slots and weights ``[T, H, K]`` and the loss's negative gradient ``[T, H, O]``."""
    ids = piece.to(model.device)
    with _watching(model, memory) as seen:
        logits = model(ids[:-1].unsqueeze(0), use_cache=False).logits[0]
        wide = torch.promote_types(logits.dtype, torch.float32)
        # Summed, so that every token counts the same in windows of any length.
        loss = F.cross_entropy(logits.to(wide), ids[1:], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, seen["correction"])
    with torch.no_grad():
        slot_idx, weights = memory.keys(memory.make_queries(seen["attended"]))
    if weights.shape != slot_idx.shape:
        raise MidusError(
            "this memory layer weighs a slot once for each of its cores and so has no one "
            "retrieval matrix; use a model with hml memory"
        )
    target = -gradient[0].unflatten(-1, (memory.num_heads, -1))
    return slot_idx[0].cpu(), weights[0].cpu().double(), target.cpu().double()


@contextmanager
def _watching(model: Any, memory: Any) -> Iterator[dict[str, Tensor]]:
    """Keeps what a memory layer reads and writes; the graph begins at its correction."""
    seen: dict[str, Tensor] = {}

    def keep(_: Any, args: tuple[Tensor, ...], correction: Tensor) -> Tensor:
        seen["attended"] = args[0].detach()
        seen["correction"] = correction.detach().requires_grad_()
        return seen["correction"]

    trainable = [p for p in model.parameters() if p.requires_grad]
    hook = memory.register_forward_hook(keep)
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield seen
    finally:
        hook.remove()
        for parameter in trainable:
            parameter.requires_grad_(True)


def _retrieval_matrix(slot_idx: Tensor, weights: Tensor) -> Tensor:
    """A_h from ``[T, H, K]`` slots and weights, over the slots that are read: ``[H, T, N]``."""
    read, column = slot_idx.unique(return_inverse=True)
    num_tokens, num_heads, _ = slot_idx.shape
    size = weights.element_size() * len(read) ** 2
    if size > _MOST_BYTES:
        raise MidusError(
            f"{num_tokens:,} tokens read {len(read):,} slots, whose products with each other take "
            f"{size / 1e9:.1f} GB; lower --tokens"
        )
    matrix = weights.new_zeros(num_heads, num_tokens, len(read))
    return matrix.scatter_add_(-1, column.movedim(1, 0), weights.movedim(1, 0))


def _scaled(target: Tensor, dtype: torch.dtype) -> Tensor:
    """``[T, H, O]`` -> ``[H, T, O]`` of Frobenius norm 1."""
    norm: Tensor = target.norm()
    if not norm.isfinite() or norm == 0:
        raise MidusError(
            f"the gradient of the loss has norm {float(norm)} at this block in {dtype}; "
            "try float32 or another text"
        )
    return target.movedim(1, 0) / norm

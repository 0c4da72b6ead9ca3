"""What fires a block's busiest slots: tokens, what follows them, and the strongest contexts."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from midus.analysis.slot_values import token_logits, written_values
from midus.analysis.token_text import text_of, token_text
from midus.models.slots import SlotCounter, read_slots

NUM_TOKENS = 8
"""Tokens named for a slot: those that fire it, follow it, are promoted, are suppressed."""
NUM_CONTEXTS = 5
TOKENS_LEFT, TOKENS_RIGHT = 16, 8
_HUB_SHARE = 0.5


def is_hub(count: int, num_tokens: int) -> bool:
    """Whether a slot fires at so many tokens that it tells little about any of them."""
    return count >= _HUB_SHARE * num_tokens


@dataclass
class SlotEvents:
    """What was seen of one (head, slot) pair."""

    head: int
    slot: int
    tokens: Counter[int] = field(default_factory=Counter)
    next_tokens: Counter[int] = field(default_factory=Counter)
    strongest: dict[tuple[int, ...], tuple[float, int]] = field(default_factory=dict)
    """Weight and position, by the tokens around; equal surroundings are kept once."""

    def add(self, ids: list[int], positions: list[int], weights: list[float], start: int) -> None:
        """Takes in one window.

        Args:
            ids: The whole text.
            positions: Where in it the slot was chosen.
            weights: How strongly.
            start: Where the window begins.
        """
        self.tokens.update(ids[p] for p in positions)
        self.next_tokens.update(ids[p + 1] for p in positions if p + 1 < len(ids))
        for position, weight in zip(positions, weights, strict=True):
            around = tuple(ids[max(start, position - 3) : position + 3])
            if around not in self.strongest or weight > self.strongest[around][0]:
                self.strongest[around] = (weight, position)
        best = sorted(self.strongest.items(), key=lambda item: (-item[1][0], item[1][1]))
        self.strongest = dict(best[:NUM_CONTEXTS])


@torch.no_grad()
def busiest_slots(
    model: Any,
    tokenizer: Any,
    pieces: Tensor,
    block: Any,
    counter: SlotCounter,
    top: int,
    track: Callable[[Iterable[Any], str], Iterable[Any]],
) -> list[dict[str, Any]]:
    """The (head, slot) pairs with the largest summed weight, and what each of them holds.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        pieces: The text in windows ``[W, T]``; it is read once more.
        block: The memory block to look at.
        counter: What it chose when the text was read the first time.
        top: How many pairs.
        track: Wraps loops in a progress bar.
    """
    layer = block.memory
    num_pairs = min(top, int((counter.counts > 0).sum()))
    pairs = counter.weights.flatten().topk(num_pairs).indices.tolist()
    events = [SlotEvents(*divmod(pair, layer.num_slots)) for pair in pairs]
    ids = pieces.flatten().tolist()
    length = pieces.shape[1]
    with _readings(layer) as readings:
        for number, piece in enumerate(track(pieces, "finding contexts")):
            model.model(piece.unsqueeze(0).to(model.device), use_cache=False)
            slot_idx, weights = readings.pop()  # [T, H, K]
            for event in events:
                # A head chooses a slot once a token at most.
                token, place = (slot_idx[:, event.head] == event.slot).nonzero(as_tuple=True)
                start = number * length
                strengths = weights[token, event.head, place].tolist()
                event.add(ids, (token + start).tolist(), strengths, start)
    frequencies = Counter(ids)
    return [
        _describe(event, model, tokenizer, block, counter, ids, frequencies, length)
        for event in events
    ]


@contextmanager
def _readings(layer: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """A list that gains a layer's slots and weights each time it runs."""
    seen: list[tuple[Tensor, Tensor]] = []

    def look(layer: Any, args: tuple[Any, ...]) -> None:
        slot_idx, weights = read_slots(layer, args[0])
        seen.append((slot_idx.cpu(), weights.float().cpu()))

    hook = layer.register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


def _describe(
    event: SlotEvents,
    model: Any,
    tokenizer: Any,
    block: Any,
    counter: SlotCounter,
    ids: list[int],
    frequencies: Counter[int],
    length: int,
) -> dict[str, Any]:
    head, slot = event.head, event.slot
    side = _side(block.memory)
    value = written_values(block, head, torch.tensor([slot], device=counter.counts.device))
    logits = token_logits(model, value)[0]
    return {
        "head": head,
        "slot": slot,
        "row": slot // side if side else None,
        "col": slot % side if side else None,
        "count": int(counter.counts[head, slot]),
        "weight": counter.weights[head, slot].item(),
        "value_norm": value.norm().item(),
        "tokens": _with_lift(event.tokens, frequencies, tokenizer),
        "next_tokens": _with_lift(event.next_tokens, frequencies, tokenizer),
        "contexts": [
            {
                "left": text_of(tokenizer, ids[max(p - p % length, p - TOKENS_LEFT) : p]),
                "token": token_text(tokenizer, ids[p]),
                "right": text_of(tokenizer, ids[p + 1 : p + 1 + TOKENS_RIGHT]),
                "weight": weight,
            }
            for weight, p in event.strongest.values()
        ],
        "promotes": _top_tokens(logits, tokenizer, largest=True),
        "suppresses": _top_tokens(logits, tokenizer, largest=False),
    }


def _side(layer: Any) -> int | None:
    """Sub-keys a side of the grid of slots; None for one key a slot."""
    return layer.keys.row_keys.shape[1] if hasattr(layer.keys, "row_keys") else None


def _with_lift(
    seen: Counter[int], frequencies: Counter[int], tokenizer: Any
) -> list[dict[str, Any]]:
    """The most frequent tokens, each with how much more frequent than in the text it is here."""
    total = frequencies.total() / max(1, seen.total())
    return [
        {
            "token": token_text(tokenizer, token),
            "count": count,
            "lift": count / frequencies[token] * total,
        }
        for token, count in seen.most_common(NUM_TOKENS)
    ]


def _top_tokens(logits: Tensor, tokenizer: Any, largest: bool) -> list[dict[str, Any]]:
    best = logits.topk(min(NUM_TOKENS, len(logits)), largest=largest)
    return [
        {"token": token_text(tokenizer, token), "logit": logit}
        for token, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]

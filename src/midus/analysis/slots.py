"""What the memories hold: which slots a text uses, what fires them, and what they write.

Paper, Section 4.2: every head of an inserted block addresses N slots of its own keys. The text is
read twice, a window at a time: once to count choices in every block, once to find what fires the
busiest slots of one block.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from midus.analysis.slot_contexts import busiest_slots
from midus.analysis.slot_usage import (
    CorrectionMeter,
    busiest_share,
    measuring_corrections,
    overlap,
    rank_frequency,
)
from midus.analysis.slot_values import describe_norms
from midus.errors import MidusError
from midus.models.families import is_upscaled
from midus.models.record import record_of
from midus.models.slots import SlotCounter, counting_slots

Track = Callable[[Iterable[Any], str], Iterable[Any]]


@dataclass(frozen=True)
class BlockSlots:
    """One memory block over the text."""

    index: int
    """In the final stack."""
    anchor: int
    """Block of the base it stands before."""
    kind: str
    """Memory layer."""
    num_heads: int
    num_slots: int
    """Per head."""
    top_k: int
    used: float
    """Share of the (head, slot) pairs chosen at least once."""
    entropy: float
    """Of the choices, averaged over heads, as a share of log(slots)."""
    weighted_entropy: float
    """The same with every choice counted by its weight."""
    dead_slots: list[int]
    """Slots each head never chose."""
    slots_no_head_uses: int
    busiest_percent_share: float
    """Share of the choices that fall on the busiest hundredth of the (head, slot) pairs."""
    head_overlap: dict[str, Any]
    """``jaccard`` and ``cosine`` of every two heads, and their means."""
    value_norms: dict[str, Any]
    """Of what each slot writes: quantiles, histogram, rows of the table that are zero."""
    correction_norm: float
    """Mean over tokens of ||correction||, the memory's own: without a bypass."""
    correction_ratio: float
    """Mean over tokens of ||correction|| / ||x||."""
    rank_frequency: dict[str, list[float]]
    """Share of the choices by rank of the (head, slot) pair, at some ranks."""


@dataclass(frozen=True)
class SlotsReport:
    """What `analyze_slots` found."""

    num_tokens: int
    """Tokens that were read: whole windows."""
    window: int
    blocks: list[BlockSlots]
    busiest: dict[str, Any]
    """``block``, and of its busiest ``slots`` what fires them and what they promote."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def busiest_block(self) -> BlockSlots:
        return next(block for block in self.blocks if block.index == self.busiest["block"])


def check_memory(config: Any, block: int | None = None) -> None:
    """Refuses a model without memory blocks, and a block that is none of them."""
    positions = record_of(config)["positions"] if is_upscaled(config.model_type) else []
    if not positions:
        raise MidusError(
            "the model has no memory blocks, whose slots this looks at; give one that "
            "`midus upscale --method midus` has grown"
        )
    if block is not None and block not in positions:
        known = ", ".join(map(str, positions))
        raise MidusError(f"block={block} is no memory block of this model; choose one of {known}")


@torch.no_grad()
def analyze_slots(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    *,
    window: int = 512,
    block: int | None = None,
    top: int = 10,
    track: Track = lambda items, _: items,
) -> SlotsReport:
    """Counts what every memory block chooses on a text and looks into the busiest slots of one.

    Args:
        model: An up-scaled model with memory blocks, in evaluation mode.
        tokenizer: Its tokenizer.
        ids: Tokens of the text ``[T]``; those at the end that fill no window are left out.
        window: Tokens a forward pass sees.
        block: Index in the final stack of the block whose busiest slots are described; default:
            the one with the largest corrections.
        top: How many (head, slot) pairs of that block.
        track: Wraps loops in a progress bar.
    """
    check_memory(model.config, block)
    pieces = _windows(ids, window, model.config)
    record = record_of(model.config)
    blocks = {index: model.model.layers[index] for index in record["positions"]}
    with (
        counting_slots(model, pieces.numel()) as counters,
        measuring_corrections(blocks) as meters,
    ):
        for piece in track(pieces, "counting slots"):
            # The decoder alone: nobody needs the logits.
            model.model(piece.unsqueeze(0).to(model.device), use_cache=False)
    reports = [
        _describe_block(
            index, anchor, record["memory"], blocks[index], counters[index], meters[index]
        )
        for index, anchor in zip(record["positions"], record["anchors"], strict=True)
    ]
    if block is None:
        # All corrections of a fresh model are zero; then the most uneven use decides.
        chosen = max(reports, key=lambda b: (b.correction_norm, b.busiest_percent_share))
        block = chosen.index
    slots = busiest_slots(model, tokenizer, pieces, blocks[block], counters[block], top, track)
    return SlotsReport(
        num_tokens=pieces.numel(),
        window=window,
        blocks=reports,
        busiest={"block": block, "slots": slots},
    )


def _windows(ids: Tensor, window: int, config: Any) -> Tensor:
    """The text as ``[W, window]``."""
    num_tokens = ids.numel()
    if num_tokens < window:
        raise MidusError(
            f"the text has {num_tokens} tokens, fewer than one window of {window}; give a longer "
            "text or a shorter window"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and window > longest:
        raise MidusError(
            f"window={window} is more than the {longest} tokens the model reads; lower it"
        )
    if int(ids.max()) >= config.vocab_size:
        raise MidusError(
            f"the tokenizer gives token {int(ids.max())}, and the model has a vocabulary of "
            f"{config.vocab_size}; use the model's own tokenizer"
        )
    return ids[: num_tokens - num_tokens % window].view(-1, window)


def _describe_block(
    index: int, anchor: int, kind: str, block: Any, counter: SlotCounter, meter: CorrectionMeter
) -> BlockSlots:
    counts, usage = counter.counts, counter.usage()
    return BlockSlots(
        index=index,
        anchor=anchor,
        kind=kind,
        num_heads=block.memory.num_heads,
        num_slots=block.memory.num_slots,
        top_k=block.memory.keys.top_k,
        used=usage.used,
        entropy=usage.entropy,
        weighted_entropy=usage.weighted_entropy,
        dead_slots=(counts == 0).sum(1).tolist(),
        slots_no_head_uses=int((counts.sum(0) == 0).sum()),
        busiest_percent_share=busiest_share(counts),
        head_overlap=overlap(counts),
        value_norms=describe_norms(block),
        correction_norm=meter.norm,
        correction_ratio=meter.ratio,
        rank_frequency=rank_frequency(counts),
    )

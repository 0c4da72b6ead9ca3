"""One token's attention over the cache, in kernels.

`attend`: attention over the cache, cut into parts that run side by side. `combine`: the parts put
together. They take a batch. `README.md` beside this file says how they follow each other and counts
bytes.

Shape letters: B sequences, D hidden, H heads, V key-value heads, E head width, L cache slots,
S parts.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import power_of_two
from midus.ops.launch import Constants, launch
from midus.ops.token_step.early import begin, early

# Programs that attention is cut into: for caches up to so many slots, and for longer ones.
_SHORT, _PROGRAMS_SHORT, _PROGRAMS = 1024, 64, 256
_BLOCK_L = 32


@triton.jit
def after_sums(sums, num_lines, width: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Where the parts' largest scores are, and their totals: behind the sums of all heads."""
    largest = sums + num_lines * NUM_PARTS * width
    return largest, largest + num_lines * NUM_PARTS


@triton.jit(do_not_specialize=["length"])
def _attend_kernel(
    queries, keys, values, past_keys, past_values, mask, position, sums, length, scale,
    stride_query, stride_query_head, stride_batch, stride_head, stride_slot,
    stride_value_batch, stride_value_head, stride_value_slot, stride_mask,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, width: tl.constexpr,
    NUM_PARTS: tl.constexpr, HAS_PAST: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_L: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of the cache for the heads that share a key-value head.

    With ``past`` the cache holds its last slot alone, and the others are copied on the way: every
    slot is read by one program, which is the one to write it.
    """
    batch = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    part = tl.program_id(1)
    begin(EARLY)
    if HAS_POSITION:
        length = (tl.load(position) + 1).to(tl.int32)  # this token is there already
    size = tl.cdiv(tl.cdiv(length, NUM_PARTS), BLOCK_L) * BLOCK_L
    groups: tl.constexpr = num_heads // num_kv_heads
    group, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    heads = kv_head * groups + group
    shown = (group < groups)[:, None] & (e < width)[None, :]
    q = tl.load(
        queries + batch * stride_query + heads[:, None] * stride_query_head + e[None, :],
        mask=shown, other=0.0,
    )  # fmt: skip
    best = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    summed = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    for start in range(part * size, tl.minimum((part + 1) * size, length), BLOCK_L):
        slot = start + tl.arange(0, BLOCK_L)
        seen = slot < length
        rows = slot[:, None].to(tl.int64)
        tile = seen[:, None] & (e < width)[None, :]
        key_at = (
            keys + batch * stride_batch + kv_head * stride_head + rows * stride_slot + e[None, :]
        )
        value_at = (
            values + batch * stride_value_batch + kv_head * stride_value_head
            + rows * stride_value_slot + e[None, :]
        )  # fmt: skip
        if HAS_PAST:
            is_past = (slot < length - 1)[:, None] & (e < width)[None, :]
            past_at = ((batch * num_kv_heads + kv_head) * (length - 1) + rows) * width + e[None, :]
            past_k = tl.load(past_keys + past_at, mask=is_past, other=0.0)
            past_v = tl.load(past_values + past_at, mask=is_past, other=0.0)
            tl.store(key_at, past_k, mask=is_past)
            tl.store(value_at, past_v, mask=is_past)
            is_last = (slot == length - 1)[:, None] & (e < width)[None, :]
            k = tl.where(is_past, past_k, tl.load(key_at, mask=is_last, other=0.0))
            v = tl.where(is_past, past_v, tl.load(value_at, mask=is_last, other=0.0))
        else:
            k = tl.load(key_at, mask=tile, other=0.0)
            v = tl.load(value_at, mask=tile, other=0.0)
        if HAS_MASK:
            seen = seen & (tl.load(mask + batch * stride_mask + slot, mask=seen, other=0) != 0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # Where nothing has been seen yet the difference would be NaN.
        base = tl.where(new_best == -float("inf"), 0.0, new_best)
        powers = tl.exp(scores - base[:, None])
        keep = tl.exp(best - base)
        total = total * keep + tl.sum(powers, axis=1)
        summed = summed * keep[:, None] + tl.dot(powers.to(v.dtype), v, input_precision="ieee")
        best = new_best
    line = (batch * num_heads + heads) * NUM_PARTS + part
    largest, totals = after_sums(sums, tl.num_programs(0) * groups, width, NUM_PARTS)
    tl.store(largest + line, best, mask=group < groups)
    tl.store(totals + line, total, mask=group < groups)
    tl.store(sums + line[:, None] * width + e[None, :], summed, mask=shown)


@triton.jit
def part_weights(largest, totals, line, NUM_PARTS: tl.constexpr, BLOCK_S: tl.constexpr):
    """What each part of the cache counts in the whole: ``[S]``, zero where nothing was seen."""
    part = tl.arange(0, BLOCK_S)
    real = part < NUM_PARTS
    best = tl.load(largest + line * NUM_PARTS + part, mask=real, other=-float("inf"))
    total = tl.load(totals + line * NUM_PARTS + part, mask=real, other=0.0)
    base = tl.max(best)
    powers = tl.exp(best - tl.where(base == -float("inf"), 0.0, base))
    whole = tl.sum(powers * total)
    return powers / tl.where(whole == 0.0, 1.0, whole)


@triton.jit
def attended(
    sums, weights, line, e, width: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_S: tl.constexpr
):
    """The head's attention output at ``e`` in float32."""
    part = tl.arange(0, BLOCK_S)[:, None]
    real = (part < NUM_PARTS) & (e < width)[None, :]
    summed = tl.load(sums + (line * NUM_PARTS + part) * width + e[None, :], mask=real, other=0.0)
    return tl.sum(summed * weights[:, None], axis=0)


@triton.jit
def _combine_kernel(
    sums, out, position, width: tl.constexpr, COUNT: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attention output of one head."""
    line = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    begin(EARLY)
    largest, totals = after_sums(sums, tl.num_programs(0), width, NUM_PARTS)
    weights = part_weights(largest, totals, line, NUM_PARTS, BLOCK_S)
    result = attended(sums, weights, line, e, width, NUM_PARTS, BLOCK_S)
    tl.store(out + line * width + e, result.to(out.dtype.element_ty), mask=e < width)
    if COUNT:
        tl.store(position, tl.load(position) + 1, mask=line == 0)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
    past: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, int]:
    """Attention of ``[B, H, E]`` over ``[B, V, L, E]``, in parts, and how many these are.

    ``length`` counts the slots in use; as a tensor, those before this token's. ``past`` is copied
    into all slots but the last. What is returned are the sums of all heads and parts, then their
    largest scores, then their totals.
    """
    batch, num_heads, width = queries.shape
    _, num_kv_heads, num_slots, _ = keys.shape
    parts = num_parts(batch * num_kv_heads, num_slots <= _SHORT)
    size = batch * num_heads * parts * (width + 2)
    sums = queries.new_empty(size, dtype=torch.float32)
    is_tensor = isinstance(length, Tensor)
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    launch(
        _attend_kernel,
        (batch * num_kv_heads, parts),
        (
            queries,
            keys,
            values,
            *(past or (keys, values)),
            queries if mask is None else mask,
            length if is_tensor else queries,
            sums,
            0 if is_tensor else length,
            scale,
            *queries.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            0 if mask is None else mask.stride(0),
        ),
        _attend_constants(
            num_heads,
            num_kv_heads,
            width,
            parts,
            past is not None,
            mask is not None,
            is_tensor,
            queries.device,
        ),
    )
    return sums, parts


@functools.cache
def num_parts(num_lines: int, is_short: bool) -> int:
    """Into how many parts to cut the caches of ``num_lines`` sequences and key-value heads.

    Two numbers for any length, since a kernel is compiled for each; short caches leave some of the
    parts empty.
    """
    programs = _PROGRAMS_SHORT if is_short else _PROGRAMS
    return power_of_two(max(1, programs // num_lines))


def attend_token(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
    count: bool = False,
) -> Tensor:
    """Attention output ``[B, H, E]``; ``count`` adds one to a length that is a tensor."""
    batch, num_heads, width = queries.shape
    sums, parts = attend(queries, keys, values, length, mask, scale)
    out = queries.new_empty(queries.shape)
    launch(
        _combine_kernel,
        (batch * num_heads,),
        (sums, out, length if count else out),
        _combine_constants(width, count, parts, queries.device),
    )
    return out


@functools.cache
def _attend_constants(
    num_heads: int, num_kv_heads: int, width: int, parts: int, has_past: bool, has_mask: bool,
    has_position: bool, device: torch.device,
) -> Constants:  # fmt: skip
    return Constants(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        NUM_PARTS=parts,
        HAS_PAST=has_past,
        HAS_MASK=has_mask,
        HAS_POSITION=has_position,
        BLOCK_G=power_of_two(num_heads // num_kv_heads, 16),
        BLOCK_E=power_of_two(width, 16),
        BLOCK_L=_BLOCK_L,
        **early(device),
    )


@functools.cache
def _combine_constants(width: int, count: bool, parts: int, device: torch.device) -> Constants:
    return Constants(
        width=width,
        COUNT=count,
        NUM_PARTS=parts,
        BLOCK_S=power_of_two(parts),
        BLOCK_E=power_of_two(width),
        **early(device),
    )

"""Linear Top-k in Triton: every slot is scored, and no score is written but the winners'.

Paper, Section 3, "Linear memory layer". `README.md` beside this file says how the winners are kept.

Shape letters: T tokens, H heads, E query width, N slots, K top_k, S splits of the slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, power_of_two
from midus.ops.launch import launch
from midus.ops.product_key_topk.kernels import half_gradient
from midus.ops.product_key_topk.search import dot_float32, query_rows
from midus.ops.weighted_gather.kernels import table_gradient

# Programs that keep a large GPU busy; where tokens are few, they share the slots of a head.
_PROGRAMS = 264
# Blocks of slots that a program has at least.
_LEAST_BLOCKS = 4


@triton.jit
def _insert(best_scores, best_slots, score, slot):
    """The K best of K + 1, best first, as one ``[T]`` for each place; a tie keeps the older one."""
    scores = ()
    slots = ()
    pushed_score, pushed_slot = score, slot
    for j in tl.static_range(len(best_scores)):
        # Places are in order: from the first one that is lower, all move down by one.
        is_lower = best_scores[j] < score
        scores += (tl.where(is_lower, pushed_score, best_scores[j]),)  # type: ignore[assignment]
        slots += (tl.where(is_lower, pushed_slot, best_slots[j]),)  # type: ignore[assignment]
        pushed_score = tl.where(is_lower, best_scores[j], pushed_score)
        pushed_slot = tl.where(is_lower, best_slots[j], pushed_slot)
    return scores, slots


@triton.jit
def _slot_scores(
    rows, query_mask, keys, start, num_slots: tl.constexpr, width: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``scores[t, j] = <query t, key start + j>`` in float32; padding scores -inf, NaN +inf.

    A NaN would hide from comparisons; as +inf it wins and turns the softmax into NaN.
    """
    place = tl.arange(0, BLOCK_N)
    is_slot = start + place < num_slots
    keys += start * width
    scores = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for first in range(0, width, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        # Where one block holds the width, the compiler takes this load out of the walk.
        q = tl.load(
            rows[:, None] + e[None, :],
            mask=query_mask[:, None] & (e < width)[None, :],
            other=0.0,
        )  # [T, E]
        k = tl.load(
            keys + place[:, None] * width + e[None, :],
            mask=is_slot[:, None] & (e < width)[None, :],
            other=0.0,
        )  # [N, E]
        scores = dot_float32(q, tl.trans(k), scores)
    scores = tl.where(scores != scores, float("inf"), scores)
    if num_slots % BLOCK_N != 0:
        scores = tl.where(is_slot[None, :], scores, -float("inf"))
    return scores


@triton.jit(do_not_specialize=["num_tokens", "slots_per_split"])
def _linear_topk_fwd_kernel(
    queries, keys, slot_idx, scores, num_tokens, slots_per_split, stride_token, stride_head,
    num_heads: tl.constexpr, num_slots: tl.constexpr, width: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``scores[t, h] = top_k over j of <q, K[h, j]>``, j in one split of the slots; best first."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < num_tokens
    rows = queries + tokens * stride_token + head * stride_head
    first = tl.program_id(2).to(tl.int64) * slots_per_split
    last = tl.minimum(first + slots_per_split, num_slots)
    place = tl.arange(0, BLOCK_N)[None, :]
    lowest = tl.full([BLOCK_T], -float("inf"), tl.float32)
    best_scores = ()
    best_slots = ()
    for _ in tl.static_range(TOP_K):
        best_scores += (lowest,)  # type: ignore[assignment]
        best_slots += (tl.zeros([BLOCK_T], tl.int32),)  # type: ignore[assignment]
    for start in range(first, last, BLOCK_N):
        block = _slot_scores(
            rows, mask, keys + head * num_slots * width, start, num_slots, width,
            BLOCK_T, BLOCK_N, BLOCK_E,
        )  # fmt: skip
        best = tl.max(block, axis=1)
        # As many rounds as the token that finds most needs: after the first blocks, one or two.
        while tl.max((best > best_scores[TOP_K - 1]).to(tl.int32), axis=0) > 0:
            found = tl.min(tl.where(block == best[:, None], place, BLOCK_N - 1), axis=1)
            block = tl.where(place == found[:, None], -float("inf"), block)
            # Slots come in rising order, so that of equal scores the older slot is the lower one.
            slot = (start + found).to(tl.int32)
            best_scores, best_slots = _insert(best_scores, best_slots, best, slot)
            best = tl.max(block, axis=1)
    line = (tokens * num_heads + head) * tl.num_programs(2) + tl.program_id(2)
    for j in tl.static_range(TOP_K):
        tl.store(scores + line * TOP_K + j, best_scores[j], mask=mask)
        tl.store(slot_idx + line * TOP_K + j, best_slots[j], mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_topk_bwd_kernel(
    grad_scores, slot_idx, keys, grad_queries, num_tokens,
    num_heads: tl.constexpr, num_slots: tl.constexpr, width: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``grad_query = sum_k grad_score_k * key_k`` for a block of queries."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < num_tokens
    place = tl.arange(0, BLOCK_K)
    line = tokens * num_heads + head
    where = (line * TOP_K)[:, None] + place[None, :]
    chosen = mask[:, None] & (place < TOP_K)[None, :]
    slots = tl.load(slot_idx + where, mask=chosen, other=0)
    grads = tl.load(grad_scores + where, mask=chosen, other=0.0).to(tl.float32)
    half_gradient(
        grads, slots, keys + head * num_slots * width, grad_queries + line * width, mask, 1, width,
        False, TOP_K, BLOCK_T, BLOCK_E, BLOCK_K, UNROLL,
    )  # fmt: skip


def linear_topk_forward(queries: Tensor, keys: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Slots (int64) and scores (float32), ``[..., H, K]`` each, for queries ``[..., H, E]``."""
    shape = (*queries.shape[:-1], top_k)
    queries = query_rows(queries)
    num_tokens, num_heads, width = queries.shape
    num_slots = keys.shape[1]
    if not num_tokens:
        return (
            torch.empty(shape, dtype=torch.int64, device=queries.device),
            torch.empty(shape, dtype=torch.float32, device=queries.device),
        )
    blocks = _search_blocks(num_tokens, width, queries.dtype, keys.dtype)
    tiles = ceil_div(num_tokens, blocks["BLOCK_T"])
    splits, slots_per_split = _split_slots(num_slots, blocks["BLOCK_N"], tiles * num_heads)
    found = (num_tokens, num_heads, splits, top_k)
    slot_idx = torch.empty(found, dtype=torch.int64, device=queries.device)
    scores = torch.empty(found, dtype=torch.float32, device=queries.device)
    launch(
        _linear_topk_fwd_kernel,
        (tiles, num_heads, splits),
        (
            queries,
            keys.contiguous(),
            slot_idx,
            scores,
            num_tokens,
            slots_per_split,
            *queries.stride()[:2],
        ),
        {
            "num_heads": num_heads,
            "num_slots": num_slots,
            "width": width,
            "TOP_K": top_k,
            **blocks,
        },
    )
    if splits > 1:
        # Splits are in the order of their slots: a stable sort leaves ties to the lowest one.
        scores, order = scores.flatten(2).sort(dim=-1, descending=True, stable=True)
        scores, order = scores[..., :top_k].contiguous(), order[..., :top_k]
        slot_idx = slot_idx.flatten(2).gather(-1, order)
    return slot_idx.view(shape), scores.view(shape)


def linear_topk_backward(
    grad_scores: Tensor, slot_idx: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys, in the types of those."""
    grad_scores = grad_scores.contiguous()
    grad_queries = query_gradient(grad_scores, slot_idx, queries, keys)
    heads = torch.arange(keys.shape[0], device=keys.device).unsqueeze(-1) * keys.shape[1]
    grad_keys = table_gradient(
        queries, slot_idx + heads, grad_scores, keys.shape[:2].numel(), keys.dtype
    )
    return grad_queries, grad_keys.view(keys.shape)


def query_gradient(grad_scores: Tensor, slot_idx: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Gradient of queries ``[..., H, E]`` in their type, from that of ``[..., H, K]`` scores."""
    grad_queries = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    num_tokens, top_k = queries.shape[:-2].numel(), slot_idx.shape[-1]
    num_heads, num_slots, width = keys.shape
    if not num_tokens:
        return grad_queries
    block_t = 32
    launch(
        _linear_topk_bwd_kernel,
        (ceil_div(num_tokens, block_t), num_heads),
        (
            grad_scores.contiguous(),
            slot_idx.contiguous(),
            keys.contiguous(),
            grad_queries,
            num_tokens,
        ),
        {
            "num_heads": num_heads,
            "num_slots": num_slots,
            "width": width,
            "TOP_K": top_k,
            "BLOCK_T": block_t,
            "BLOCK_E": min(power_of_two(width, 16), 64),
            "BLOCK_K": power_of_two(top_k),
            "UNROLL": min(top_k, 4),
        },
    )
    return grad_queries


def _search_blocks(
    num_tokens: int, width: int, query_type: torch.dtype, key_type: torch.dtype
) -> dict[str, int]:
    """What registers hold, for products on tensor cores and for those in float32."""
    narrow = power_of_two(width, 16)
    if _on_tensor_cores(query_type, key_type):
        block_t = max(min(128, power_of_two(num_tokens)), 16)
        return {
            "BLOCK_T": block_t,
            "BLOCK_N": 64 if narrow <= 64 else 32,
            "BLOCK_E": narrow if narrow <= 128 else 64,
            "num_warps": 8 if block_t == 128 else 4,
        }
    block_t = max(min(64, power_of_two(num_tokens)), 16)
    return {
        "BLOCK_T": block_t,
        "BLOCK_N": 64,
        "BLOCK_E": min(narrow, 32),
        "num_warps": 8 if block_t == 64 else 4,
    }


def _on_tensor_cores(query_type: torch.dtype, key_type: torch.dtype) -> bool:
    """Whether ``dot_float32`` multiplies these as 16-bit numbers."""
    if query_type == key_type:
        return key_type != torch.float32
    return query_type == torch.bfloat16 and key_type == torch.float32


def _split_slots(num_slots: int, block_n: int, programs: int) -> tuple[int, int]:
    """How many programs share the slots of a head, and the slots of each: whole blocks."""
    num_blocks = ceil_div(num_slots, block_n)
    splits = max(1, min(_PROGRAMS // programs, num_blocks // _LEAST_BLOCKS))
    blocks_each = ceil_div(num_blocks, splits)
    return ceil_div(num_blocks, blocks_each), blocks_each * block_n

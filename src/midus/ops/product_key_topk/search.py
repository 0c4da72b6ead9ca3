"""Scores and the best slots of a block of tokens, as functions of kernels.

Paper, Section 4.2 (two stages) and Appendix "Fused Cartesian Top-k" (short queries). The first
half of every kernel that retrieves: here, in `ops/headwise_memory` and in `ops/token_step`.

Shape letters: T tokens, H heads, E query width, n sub-keys, K top_k.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import power_of_two


@triton.jit
def dot_float32(a, b, acc):
    """``acc + a @ b`` with float32 products and sums, whatever the operands' types."""
    if a.dtype == b.dtype:
        # Products of 16-bit numbers are exact in float32; float32 itself must not become tf32.
        acc = tl.dot(a, b, acc, input_precision="ieee")
    elif a.dtype == tl.bfloat16 and b.dtype == tl.float32:
        # Three bfloat16 pieces hold all 24 bits of b, so tensor cores lose nothing.
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(a, low, acc)
        acc = tl.dot(a, middle, acc)
        acc = tl.dot(a, high, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def subkey_scores(
    queries, query_mask, keys, num_subkeys: tl.constexpr, width: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``scores[t, i] = <query t, sub-key i>`` in float32; padding scores -inf, NaN scores +inf.

    A NaN would hide from comparisons; as +inf it wins and turns the softmax into NaN.
    """
    subkey = tl.arange(0, BLOCK_N)
    scores = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        q = tl.load(
            queries[:, None] + e[None, :],
            mask=query_mask[:, None] & (e < width)[None, :],
            other=0.0,
        )  # [T, E]
        k = tl.load(
            keys + subkey[:, None] * width + e[None, :],
            mask=(subkey < num_subkeys)[:, None] & (e < width)[None, :],
            other=0.0,
        )  # [n, E]
        scores = dot_float32(q, tl.trans(k), scores)
    scores = tl.where(scores != scores, float("inf"), scores)
    return tl.where((subkey < num_subkeys)[None, :], scores, -float("inf"))


@triton.jit
def two_stage_topk(
    row_scores, col_scores, num_subkeys: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The best slots of every token from its k best rows and k best columns, best first.

    Equal sub-key scores go to the lowest sub-key, equal pair scores to the lowest slot.
    """
    BLOCK_T: tl.constexpr = row_scores.shape[0]
    subkey = tl.arange(0, row_scores.shape[1])[None, :]
    pair = tl.arange(0, BLOCK_K * BLOCK_K)[None, :]
    pair_scores = tl.full([BLOCK_T, BLOCK_K * BLOCK_K], -float("inf"), tl.float32)
    candidates = tl.zeros([BLOCK_T, BLOCK_K * BLOCK_K], tl.int32)
    for i in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        best = tl.max(row_scores, axis=1)[:, None]
        row = tl.min(tl.where(row_scores == best, subkey, num_subkeys - 1), axis=1)[:, None]
        row_scores = tl.where(subkey == row, -float("inf"), row_scores)
        here = pair // BLOCK_K == i
        pair_scores = tl.where(here, best, pair_scores)
        candidates = tl.where(here, row * num_subkeys, candidates)
    for j in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        best = tl.max(col_scores, axis=1)[:, None]
        col = tl.min(tl.where(col_scores == best, subkey, num_subkeys - 1), axis=1)[:, None]
        col_scores = tl.where(subkey == col, -float("inf"), col_scores)
        here = pair % BLOCK_K == j
        pair_scores = tl.where(here, pair_scores + best, pair_scores)
        candidates = tl.where(here, candidates + col, candidates)
    # Pairs past TOP_K exist only where TOP_K is no power of two; they hold half a score.
    real = (pair // BLOCK_K < TOP_K) & (pair % BLOCK_K < TOP_K)
    pair_scores = tl.where(real, pair_scores, -float("inf"))
    place = tl.arange(0, BLOCK_K)[None, :]
    scores = tl.full([BLOCK_T, BLOCK_K], -float("inf"), tl.float32)
    slot_idx = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    last_slot = num_subkeys * num_subkeys - 1
    for j in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        best = tl.max(pair_scores, axis=1)[:, None]
        slot = tl.min(tl.where(pair_scores == best, candidates, last_slot), axis=1)[:, None]
        pair_scores = tl.where(candidates == slot, -float("inf"), pair_scores)
        scores = tl.where(place == j, best, scores)
        slot_idx = tl.where(place == j, slot, slot_idx)
    return slot_idx, scores  # [T, K] each


@triton.jit
def cartesian_topk(
    row_scores, col_scores, num_subkeys: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The best slots of ONE token from all n * n sums, best first, equal scores as above."""
    subkey = tl.arange(0, row_scores.shape[1])
    row = tl.sum(row_scores, axis=0)  # [n], a sum of one
    col = tl.sum(col_scores, axis=0)
    grid = row[:, None] + col[None, :]  # [n, n]
    slots = subkey[:, None] * num_subkeys + subkey[None, :]
    real = (subkey < num_subkeys)[:, None] & (subkey < num_subkeys)[None, :]
    grid = tl.where(real, grid, -float("inf"))
    # Padding shares the numbers of real slots; past the last one it can be told apart.
    last_slot = num_subkeys * num_subkeys - 1
    slots = tl.where(real, slots, last_slot + 1)
    place = tl.arange(0, BLOCK_K)[None, :]
    scores = tl.full([1, BLOCK_K], -float("inf"), tl.float32)
    slot_idx = tl.zeros([1, BLOCK_K], tl.int32)
    for j in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        best = tl.max(grid)
        slot = tl.min(tl.where(grid == best, slots, last_slot))
        grid = tl.where(slots == slot, -float("inf"), grid)
        scores = tl.where(place == j, best, scores)
        slot_idx = tl.where(place == j, slot, slot_idx)
    return slot_idx, scores  # [1, K] each


@triton.jit
def find_slots(
    queries, row_keys, col_keys, tokens, num_tokens, head, num_subkeys: tl.constexpr,
    subkey_dim: tl.constexpr,
    stride_token, stride_head,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, CARTESIAN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Slots and scores of one head for a block of tokens (one token, where CARTESIAN)."""
    mask = tokens < num_tokens
    rows = queries + tokens * stride_token + head * stride_head
    keys = head * num_subkeys * subkey_dim
    row_scores = subkey_scores(
        rows, mask, row_keys + keys, num_subkeys, subkey_dim, BLOCK_T, BLOCK_N, BLOCK_E
    )
    col_scores = subkey_scores(
        rows + subkey_dim, mask, col_keys + keys, num_subkeys, subkey_dim,
        BLOCK_T, BLOCK_N, BLOCK_E,
    )  # fmt: skip
    if CARTESIAN:
        slot_idx, scores = cartesian_topk(
            row_scores, col_scores, num_subkeys, TOP_K, BLOCK_K, UNROLL
        )
    else:
        slot_idx, scores = two_stage_topk(
            row_scores, col_scores, num_subkeys, TOP_K, BLOCK_K, UNROLL
        )
    return slot_idx, scores  # [T, K] each


def search_blocks(num_subkeys: int, subkey_dim: int, top_k: int) -> dict[str, Any]:
    """Block sizes of ``find_slots`` that do not depend on the number of tokens."""
    return {
        "TOP_K": top_k,
        "BLOCK_N": power_of_two(num_subkeys, 16),
        # A tile of keys takes the same room for any number of them.
        "BLOCK_E": min(
            power_of_two(subkey_dim, 16), max(8192 // power_of_two(num_subkeys), 16), 64
        ),
        "BLOCK_K": power_of_two(top_k),
        "UNROLL": min(top_k, 4),
    }


def search_tokens(num_tokens: int, num_subkeys: int, top_k: int) -> int:
    """Tokens of one program: what its registers hold of n scores and k * k pairs a token."""
    scores = power_of_two(num_subkeys, 16)
    pairs = power_of_two(top_k) ** 2
    return max(16, min(64, 4096 // scores, 16384 // pairs, power_of_two(num_tokens)))


def query_rows(queries: Tensor) -> Tensor:
    """Queries as ``[T, H, E]`` with contiguous rows; tokens and heads may be strided."""
    if queries.dim() != 3:
        queries = queries.reshape(-1, *queries.shape[-2:])
    return queries if queries.stride(-1) == 1 else queries.contiguous()

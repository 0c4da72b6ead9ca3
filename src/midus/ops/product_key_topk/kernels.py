"""Product-key Top-k in Triton: scores, selection and their gradients without the n * n grid.

Paper, Section 4.2 (two stages) and Appendix "Fused Cartesian Top-k" (short queries). The device
functions here are also the first half of the fused layer in `ops/headwise_memory`.

Shape letters: T tokens, H heads, E query width, n sub-keys, K top_k.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, num_splits, power_of_two
from midus.ops.launch import launch


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


@triton.jit
def _half_gradient(
    grad_scores, slot_idx, keys, grad_queries, mask, num_subkeys: tl.constexpr,
    subkey_dim: tl.constexpr,
    IS_COLUMN: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """``grad_query = sum_k grad_score_k * key_k``, written for one half of a block of queries."""
    place = tl.arange(0, BLOCK_K)[None, :]
    for start in range(0, subkey_dim, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        real = mask[:, None] & (e < subkey_dim)[None, :]
        grad = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        for j in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
            slot = tl.sum(tl.where(place == j, slot_idx, 0), axis=1)  # [T]
            grad_score = tl.sum(tl.where(place == j, grad_scores, 0.0), axis=1)
            subkey = slot % num_subkeys if IS_COLUMN else slot // num_subkeys
            key = tl.load(keys + subkey[:, None] * subkey_dim + e[None, :], mask=real, other=0.0)
            grad += grad_score[:, None] * key.to(tl.float32)
        grad = grad.to(grad_queries.dtype.element_ty)
        tl.store(grad_queries[:, None] + e[None, :], grad, mask=real)


@triton.jit
def query_gradients(
    grad_scores, slot_idx, row_keys, col_keys, grad_queries, line, head, mask,
    num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Both halves of the queries at the given lines of ``[T, H, E]``."""
    rows = grad_queries + line * 2 * subkey_dim
    keys = head * num_subkeys * subkey_dim
    _half_gradient(
        grad_scores, slot_idx, row_keys + keys, rows, mask, num_subkeys, subkey_dim,
        False, TOP_K, BLOCK_T, BLOCK_E, BLOCK_K, UNROLL,
    )  # fmt: skip
    _half_gradient(
        grad_scores, slot_idx, col_keys + keys, rows + subkey_dim, mask, num_subkeys, subkey_dim,
        True, TOP_K, BLOCK_T, BLOCK_E, BLOCK_K, UNROLL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _product_key_topk_fwd_kernel(
    queries, row_keys, col_keys, slot_idx, scores, num_tokens, stride_token, stride_head,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, CARTESIAN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """``scores[t, h] = top_k over (i, j) of <q_row, K_row[i]> + <q_col, K_col[j]>``."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    found, found_scores = find_slots(
        queries, row_keys, col_keys, tokens, num_tokens, head, num_subkeys, subkey_dim,
        stride_token, stride_head, TOP_K, BLOCK_T, BLOCK_N, BLOCK_E, BLOCK_K, CARTESIAN, UNROLL,
    )  # fmt: skip
    place = tl.arange(0, BLOCK_K)
    where = ((tokens * num_heads + head) * TOP_K)[:, None] + place[None, :]
    mask = (tokens < num_tokens)[:, None] & (place < TOP_K)[None, :]
    tl.store(slot_idx + where, found, mask=mask)
    tl.store(scores + where, found_scores, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _product_key_topk_bwd_kernel(
    grad_scores, slot_idx, row_keys, col_keys, grad_queries, num_tokens,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``grad_query = sum_k grad_score_k * key_k`` for both halves of a block of queries."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < num_tokens
    place = tl.arange(0, BLOCK_K)
    where = ((tokens * num_heads + head) * TOP_K)[:, None] + place[None, :]
    chosen = mask[:, None] & (place < TOP_K)[None, :]
    slots = tl.load(slot_idx + where, mask=chosen, other=0)
    grads = tl.load(grad_scores + where, mask=chosen, other=0.0).to(tl.float32)
    query_gradients(
        grads, slots, row_keys, col_keys, grad_queries, tokens * num_heads + head, head, mask,
        num_subkeys, subkey_dim, TOP_K, BLOCK_T, BLOCK_E, BLOCK_K, UNROLL,
    )  # fmt: skip


@triton.jit
def key_gradient_tile(
    grad_scores, slot_idx, queries, partials, tile, head, first, last,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    stride_token, stride_head,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``grad_keys[i] = sum over (t, k) that chose sub-key i of grad_score * query[t]``.

    One tile of one head's row or column keys, over the tokens from ``first`` to ``last``. The
    choices of a block of tokens form a sparse [T, n] matrix, built in registers; its product with
    the queries adds every repetition up without one atomic. ``partials`` is ``[2, H, n, E/2]``.
    """
    tiles_e: tl.constexpr = (subkey_dim + BLOCK_E - 1) // BLOCK_E
    tiles: tl.constexpr = (num_subkeys + BLOCK_N - 1) // BLOCK_N * tiles_e
    is_column = tile // tiles
    subkey = tile % tiles // tiles_e * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tile % tiles_e * BLOCK_E + tl.arange(0, BLOCK_E)
    grad = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for start in range(first, last, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        mask = tokens < last
        chosen = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for j in tl.range(0, TOP_K, loop_unroll_factor=4):
            where = (tokens * num_heads + head) * TOP_K + j
            slot = tl.load(slot_idx + where, mask=mask, other=0).to(tl.int32)
            grad_score = tl.load(grad_scores + where, mask=mask, other=0.0).to(tl.float32)
            own = tl.where(is_column == 1, slot % num_subkeys, slot // num_subkeys)
            chosen += tl.where(own[:, None] == subkey[None, :], grad_score[:, None], 0.0)
        half = queries + tokens * stride_token + head * stride_head + is_column * subkey_dim
        q = tl.load(
            half[:, None] + e[None, :],
            mask=mask[:, None] & (e < subkey_dim)[None, :],
            other=0.0,
        )
        if q.dtype == tl.float16:
            # Gradients of scores can lie under float16's range; tf32 holds float16 exactly.
            grad = tl.dot(tl.trans(chosen), q.to(tl.float32), grad, input_precision="tf32")
        else:
            grad = tl.dot(tl.trans(chosen).to(q.dtype), q, grad, input_precision="ieee")
    keys = (is_column * num_heads + head) * num_subkeys * subkey_dim
    real = (subkey < num_subkeys)[:, None] & (e < subkey_dim)[None, :]
    tl.store(partials + keys + subkey[:, None] * subkey_dim + e[None, :], grad, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_split"])
def _key_gradient_kernel(
    grad_scores, slot_idx, queries, partials, num_tokens, tokens_per_split, stride_token,
    stride_head,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``grad_keys[i] = sum over (t, k) that chose sub-key i of grad_score * query[t]``."""
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, num_tokens)
    key_gradient_tile(
        grad_scores, slot_idx, queries, partials + split * 2 * num_heads * num_subkeys * subkey_dim,
        tl.program_id(0), head, first, last, num_heads, num_subkeys, subkey_dim,
        stride_token, stride_head, TOP_K, BLOCK_T, BLOCK_N, BLOCK_E,
    )  # fmt: skip


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


def product_key_topk_forward(
    queries: Tensor, row_keys: Tensor, col_keys: Tensor, top_k: int, cartesian: bool
) -> tuple[Tensor, Tensor]:
    """Slots (int64) and scores (float32), ``[..., H, K]`` each, for queries ``[..., H, E]``."""
    shape = (*queries.shape[:-1], top_k)
    queries = query_rows(queries)
    num_tokens, num_heads, _ = queries.shape
    num_subkeys, subkey_dim = row_keys.shape[1:]
    slot_idx = torch.empty(shape, dtype=torch.int64, device=queries.device)
    scores = torch.empty(shape, dtype=torch.float32, device=queries.device)
    if not num_tokens:
        return slot_idx, scores
    block_t = 1 if cartesian else search_tokens(num_tokens, num_subkeys, top_k)
    launch(
        _product_key_topk_fwd_kernel,
        (ceil_div(num_tokens, block_t), num_heads),
        (
            queries,
            row_keys.contiguous(),
            col_keys.contiguous(),
            slot_idx,
            scores,
            num_tokens,
            *queries.stride()[:2],
        ),
        {
            "num_heads": num_heads,
            "num_subkeys": num_subkeys,
            "subkey_dim": subkey_dim,
            "BLOCK_T": block_t,
            "CARTESIAN": cartesian,
            **search_blocks(num_subkeys, subkey_dim, top_k),
        },
    )
    return slot_idx, scores


def product_key_topk_backward(
    grad_scores: Tensor, slot_idx: Tensor, queries: Tensor, row_keys: Tensor, col_keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, row keys and column keys, in the types of those."""
    grad_queries = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    queries = query_rows(queries)
    num_tokens, num_heads, _ = queries.shape
    top_k = slot_idx.shape[-1]
    num_subkeys, subkey_dim = row_keys.shape[1:]
    if not num_tokens:
        return grad_queries, torch.zeros_like(row_keys), torch.zeros_like(col_keys)
    grad_scores = grad_scores.contiguous()
    block_t = 32
    launch(
        _product_key_topk_bwd_kernel,
        (ceil_div(num_tokens, block_t), num_heads),
        (
            grad_scores,
            slot_idx,
            row_keys.contiguous(),
            col_keys.contiguous(),
            grad_queries,
            num_tokens,
        ),
        {
            "num_heads": num_heads,
            "num_subkeys": num_subkeys,
            "subkey_dim": subkey_dim,
            "TOP_K": top_k,
            "BLOCK_T": block_t,
            "BLOCK_E": min(power_of_two(subkey_dim, 16), 64),
            "BLOCK_K": power_of_two(top_k),
            "UNROLL": min(top_k, 4),
        },
    )
    return grad_queries, *key_gradient(grad_scores, slot_idx, queries, row_keys, col_keys)


def key_gradient(
    grad_scores: Tensor, slot_idx: Tensor, queries: Tensor, row_keys: Tensor, col_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of row and column keys, in their types."""
    num_tokens, num_heads, _ = queries.shape
    top_k = slot_idx.shape[-1]
    num_subkeys, subkey_dim = row_keys.shape[1:]
    tiles, blocks = key_tiles(num_subkeys, subkey_dim)
    splits = num_splits(num_tokens, tiles * num_heads, blocks["BLOCK_T"])
    partials = torch.empty((splits, 2, *row_keys.shape), dtype=torch.float32, device=queries.device)
    launch(
        _key_gradient_kernel,
        (tiles, num_heads, splits),
        (
            grad_scores,
            slot_idx,
            queries,
            partials,
            num_tokens,
            ceil_div(num_tokens, splits),
            *queries.stride()[:2],
        ),
        {
            "num_heads": num_heads,
            "num_subkeys": num_subkeys,
            "subkey_dim": subkey_dim,
            "TOP_K": top_k,
            **blocks,
        },
    )
    grad_row, grad_col = partials.sum(dim=0).unbind(0)
    return grad_row.to(row_keys.dtype, copy=True), grad_col.to(col_keys.dtype, copy=True)


def key_tiles(num_subkeys: int, subkey_dim: int) -> tuple[int, dict[str, int]]:
    """Tiles of one head's row and column keys, and the blocks of ``key_gradient_tile``."""
    block_n = min(power_of_two(num_subkeys, 16), 64)
    block_e = min(power_of_two(subkey_dim, 16), 64)
    tiles = 2 * ceil_div(num_subkeys, block_n) * ceil_div(subkey_dim, block_e)
    return tiles, {"BLOCK_T": 32, "BLOCK_N": block_n, "BLOCK_E": block_e}


def query_rows(queries: Tensor) -> Tensor:
    """Queries as ``[T, H, E]`` with contiguous rows; tokens and heads may be strided."""
    if queries.dim() != 3:
        queries = queries.reshape(-1, *queries.shape[-2:])
    return queries if queries.stride(-1) == 1 else queries.contiguous()

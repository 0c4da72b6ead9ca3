"""Product-key Top-k in Triton: selection and its gradients without the n * n grid.

Paper, Section 4.2; the search itself is in `search.py`. The gradients are also those of the fused
layer in `ops/headwise_memory`.

Shape letters: T tokens, H heads, E query width, n sub-keys, K top_k.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, num_splits, power_of_two
from midus.ops.launch import launch
from midus.ops.product_key_topk.search import find_slots, query_rows, search_blocks, search_tokens


@triton.jit
def half_gradient(
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
    half_gradient(
        grad_scores, slot_idx, row_keys + keys, rows, mask, num_subkeys, subkey_dim,
        False, TOP_K, BLOCK_T, BLOCK_E, BLOCK_K, UNROLL,
    )  # fmt: skip
    half_gradient(
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

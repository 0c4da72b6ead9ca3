"""Tucker Top-k in Triton: routing by the linear search, then exact scores of K * K candidates.

Huang et al. (2024), "Ultra-Sparse Memory Network". `README.md` beside this file has the formulas.

Shape letters: T tokens, H heads, E half the query width, n sub-keys a side, r rank, C cores,
K top_k.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, power_of_two
from midus.ops.launch import launch
from midus.ops.linear_topk.kernels import linear_topk_forward, query_gradient
from midus.ops.product_key_topk.search import query_rows
from midus.ops.tucker_topk.reference import leading_vectors
from midus.ops.weighted_gather.kernels import sort_entries, table_gradient

# Numbers of keys that one program gathers at a time.
_GATHERED = 4096
# Winners whose gradients one program computes.
_BLOCK_M = 512


@triton.jit
def _side_scores(
    rows, mask, keys, subkeys, rank: tl.constexpr, width: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``scores[t, k, r] = <query t, keys[subkeys[t, k], r]>`` in float32; zero beyond the rank."""
    r = tl.arange(0, BLOCK_R)
    scores = tl.zeros([subkeys.shape[0], subkeys.shape[1], BLOCK_R], tl.float32)
    line = subkeys[:, :, None] * rank + r[None, None, :]  # [T, K, r]
    is_key = (mask[:, None] & (subkeys >= 0))[:, :, None] & (r < rank)[None, None, :]
    for start in range(0, width, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        q = tl.load(
            rows[:, None] + e[None, :], mask=mask[:, None] & (e < width)[None, :], other=0.0
        ).to(tl.float32)  # [T, E]
        k = tl.load(
            keys + line[:, :, :, None] * width + e[None, None, None, :],
            mask=is_key[:, :, :, None] & (e < width)[None, None, None, :],
            other=0.0,
        ).to(tl.float32)  # [T, K, r, E]
        scores += tl.sum(q[:, None, None, :] * k, axis=3)
    return scores


@triton.jit
def _pair_scores(row_parts, col_parts, core, rank: tl.constexpr):
    """``scores[t, i, j] = row_parts[t, i]^T core col_parts[t, j]``, flat: ``[T, K * K]``."""
    BLOCK_T: tl.constexpr = row_parts.shape[0]
    BLOCK_K: tl.constexpr = row_parts.shape[1]
    r = tl.arange(0, row_parts.shape[2])
    scores = tl.zeros([BLOCK_T, BLOCK_K, BLOCK_K], tl.float32)
    for s in range(rank):
        column = tl.load(core + r * rank + s, mask=r < rank, other=0.0).to(tl.float32)
        left = tl.sum(row_parts * column[None, None, :], axis=2)  # [T, K]
        right = tl.sum(tl.where((r == s)[None, None, :], col_parts, 0.0), axis=2)
        scores += left[:, :, None] * right[:, None, :]
    return tl.reshape(scores, [BLOCK_T, BLOCK_K * BLOCK_K])


@triton.jit(do_not_specialize=["num_tokens"])
def _tucker_topk_fwd_kernel(
    row_queries, col_queries, row_keys, col_keys, cores, row_idx, col_idx, slot_idx, scores,
    row_parts, col_parts, num_tokens, row_stride_token, row_stride_head, col_stride_token,
    col_stride_head,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, width: tl.constexpr, rank: tl.constexpr,
    num_cores: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``top_k over (i, j) of sum_c row(i)^T core_c col(j)``, i and j the candidates' sub-keys.

    Writes the winners' slots, their score for each core, and row(i) and col(j) of each winner,
    which is all that the gradients need besides the inputs.
    """
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < num_tokens
    place = tl.arange(0, BLOCK_K)[None, :]
    line = tokens * num_heads + head
    # A sub-key of -1 stands for none.
    where = (line * TOP_K)[:, None] + place
    is_candidate = mask[:, None] & (place < TOP_K)
    row = tl.load(row_idx + where, mask=is_candidate, other=-1).to(tl.int32)  # [T, K]
    col = tl.load(col_idx + where, mask=is_candidate, other=-1).to(tl.int32)
    keys = head * num_subkeys * rank * width
    rows = _side_scores(
        row_queries + tokens * row_stride_token + head * row_stride_head, mask, row_keys + keys,
        row, rank, width, BLOCK_R, BLOCK_E,
    )  # fmt: skip
    cols = _side_scores(
        col_queries + tokens * col_stride_token + head * col_stride_head, mask, col_keys + keys,
        col, rank, width, BLOCK_R, BLOCK_E,
    )  # fmt: skip
    pairs = tl.zeros([BLOCK_T, BLOCK_K * BLOCK_K], tl.float32)
    for c in range(num_cores):
        pairs += _pair_scores(rows, cols, cores + (c * num_heads + head) * rank * rank, rank)
    # A NaN would hide from comparisons; as +inf it wins.
    pairs = tl.where(pairs != pairs, float("inf"), pairs)
    last_slot = num_subkeys * num_subkeys - 1
    slots = row[:, :, None] * num_subkeys + col[:, None, :]
    is_pair = (row >= 0)[:, :, None] & (col >= 0)[:, None, :]
    # Past the last slot, what is no pair can be told apart.
    slots = tl.where(is_pair, slots, last_slot + 1)
    slots = tl.reshape(slots, [BLOCK_T, BLOCK_K * BLOCK_K])
    pairs = tl.where(slots <= last_slot, pairs, -float("inf"))
    found = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for j in range(TOP_K):
        best = tl.max(pairs, axis=1)[:, None]
        slot = tl.min(tl.where(pairs == best, slots, last_slot), axis=1)[:, None]
        pairs = tl.where(slots == slot, -float("inf"), pairs)
        found = tl.where(place == j, slot, found)
    tl.store(slot_idx + where, found, mask=is_candidate)
    r = tl.arange(0, BLOCK_R)[None, :]
    for j in range(TOP_K):
        slot = tl.sum(tl.where(place == j, found, 0), axis=1)[:, None]
        row_part = tl.sum(tl.where((row == slot // num_subkeys)[:, :, None], rows, 0.0), axis=1)
        col_part = tl.sum(tl.where((col == slot % num_subkeys)[:, :, None], cols, 0.0), axis=1)
        part = ((line * TOP_K + j) * rank)[:, None] + r  # [T, r]
        tl.store(row_parts + part, row_part, mask=mask[:, None] & (r < rank))
        tl.store(col_parts + part, col_part, mask=mask[:, None] & (r < rank))
    for c in range(num_cores):
        pairs = _pair_scores(rows, cols, cores + (c * num_heads + head) * rank * rank, rank)
        for j in range(TOP_K):
            slot = tl.sum(tl.where(place == j, found, 0), axis=1)[:, None]
            score = tl.sum(tl.where(slots == slot, pairs, 0.0), axis=1)
            tl.store(scores + (line * TOP_K + j) * num_cores + c, score, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _tucker_topk_bwd_kernel(
    grad_scores, row_parts, col_parts, cores, grad_rows, grad_cols, partials, num_tokens,
    num_heads: tl.constexpr, rank: tl.constexpr, num_cores: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """``grad_row = sum_c g_c core_c col``, ``grad_col = sum_c g_c core_c^T row`` for each winner.

    And ``partials[c] = sum g_c row col^T`` over the block's winners, for the gradient of the cores.
    """
    head = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = entry < num_tokens.to(tl.int64) * TOP_K
    line = (entry // TOP_K * num_heads + head) * TOP_K + entry % TOP_K
    for r in range(rank):
        grad_row = tl.zeros([BLOCK_M], tl.float32)
        grad_col = tl.zeros([BLOCK_M], tl.float32)
        for s in range(rank):
            row = tl.load(row_parts + line * rank + s, mask=mask, other=0.0)
            col = tl.load(col_parts + line * rank + s, mask=mask, other=0.0)
            for c in range(num_cores):
                core = cores + (c * num_heads + head) * rank * rank
                grad = tl.load(grad_scores + line * num_cores + c, mask=mask, other=0.0)
                grad_row += grad * tl.load(core + r * rank + s).to(tl.float32) * col
                grad_col += grad * tl.load(core + s * rank + r).to(tl.float32) * row
        tl.store(grad_rows + line * rank + r, grad_row, mask=mask)
        tl.store(grad_cols + line * rank + r, grad_col, mask=mask)
    for c in range(num_cores):
        grad = tl.load(grad_scores + line * num_cores + c, mask=mask, other=0.0)
        core = ((tl.program_id(0) * num_cores + c) * num_heads + head) * rank * rank
        for r in range(rank):
            row = tl.load(row_parts + line * rank + r, mask=mask, other=0.0)
            for s in range(rank):
                col = tl.load(col_parts + line * rank + s, mask=mask, other=0.0)
                tl.store(partials + core + r * rank + s, tl.sum(grad * row * col, axis=0))


def tucker_topk_forward(
    row_queries: Tensor,
    col_queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    cores: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots ``[..., H, K]``, scores ``[..., H, K, C]``, and row(i) and col(j) of every winner.

    The last two are ``[..., H, K, r]`` each and what the backward pass needs of the scores.
    """
    shape = (*row_queries.shape[:-1], top_k)
    num_heads, num_subkeys, width, rank = row_keys.shape
    num_cores, device = cores.shape[0], row_queries.device
    slot_idx = torch.empty(shape, dtype=torch.int64, device=device)
    scores = torch.empty((*shape, num_cores), dtype=torch.float32, device=device)
    row_parts, col_parts = (
        torch.empty((*shape, rank), dtype=torch.float32, device=device) for _ in range(2)
    )
    row_queries, col_queries = query_rows(row_queries), query_rows(col_queries)
    num_tokens = row_queries.shape[0]
    if not num_tokens:
        return slot_idx, scores, row_parts, col_parts
    with torch.autocast(device.type, enabled=False):
        left, right = leading_vectors(cores.float().sum(dim=0))  # [H, r] each
    row_idx, _ = linear_topk_forward(row_queries, _routing_keys(row_keys, left), top_k)
    col_idx, _ = linear_topk_forward(col_queries, _routing_keys(col_keys, right), top_k)
    block_k, block_r = power_of_two(top_k), power_of_two(rank)
    block_e = min(power_of_two(width, 16), 32)
    block_t = max(min(_GATHERED // (block_k * block_r * block_e), power_of_two(num_tokens)), 1)
    launch(
        _tucker_topk_fwd_kernel,
        (ceil_div(num_tokens, block_t), num_heads),
        (
            row_queries,
            col_queries,
            _by_rank(row_keys),
            _by_rank(col_keys),
            cores.contiguous(),
            row_idx,
            col_idx,
            slot_idx,
            scores,
            row_parts,
            col_parts,
            num_tokens,
            *row_queries.stride()[:2],
            *col_queries.stride()[:2],
        ),
        {
            "num_heads": num_heads,
            "num_subkeys": num_subkeys,
            "width": width,
            "rank": rank,
            "num_cores": num_cores,
            "TOP_K": top_k,
            "BLOCK_T": block_t,
            "BLOCK_K": block_k,
            "BLOCK_R": block_r,
            "BLOCK_E": block_e,
        },
    )
    return slot_idx, scores, row_parts, col_parts


def tucker_topk_backward(
    grad_scores: Tensor,
    slot_idx: Tensor,
    row_parts: Tensor,
    col_parts: Tensor,
    row_queries: Tensor,
    col_queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    cores: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both queries, both keys and the cores, in the types of those."""
    num_cores, num_heads, rank, _ = cores.shape
    num_subkeys, top_k = row_keys.shape[1], slot_idx.shape[-1]
    num_tokens = slot_idx.shape[:-2].numel()
    grad_rows, grad_cols = torch.empty_like(row_parts), torch.empty_like(col_parts)
    blocks = ceil_div(num_tokens * top_k, _BLOCK_M)
    partials = torch.empty((blocks, *cores.shape), dtype=torch.float32, device=cores.device)
    if num_tokens:
        launch(
            _tucker_topk_bwd_kernel,
            (blocks, num_heads),
            (
                grad_scores.contiguous(),
                row_parts,
                col_parts,
                cores.contiguous(),
                grad_rows,
                grad_cols,
                partials,
                num_tokens,
            ),
            {
                "num_heads": num_heads,
                "rank": rank,
                "num_cores": num_cores,
                "TOP_K": top_k,
                "BLOCK_M": _BLOCK_M,
            },
        )
    grad_row_queries, grad_row_keys = _side_gradients(
        grad_rows, slot_idx // num_subkeys, row_queries, row_keys
    )
    grad_col_queries, grad_col_keys = _side_gradients(
        grad_cols, slot_idx % num_subkeys, col_queries, col_keys
    )
    grad_cores = partials.sum(dim=0).to(cores.dtype)
    return grad_row_queries, grad_col_queries, grad_row_keys, grad_col_keys, grad_cores


def _side_gradients(
    grads: Tensor, subkeys: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of one side's queries and keys from those of its scores ``[..., H, K, r]``."""
    num_heads, num_subkeys, width, rank = keys.shape
    # For the queries, r keys a sub-key are as good as r slots.
    slots = subkeys.unsqueeze(-1) * rank + torch.arange(rank, device=keys.device)
    flat_keys = _by_rank(keys).view(num_heads, num_subkeys * rank, width)
    grad_queries = query_gradient(grads.flatten(-2), slots.flatten(-2), queries, flat_keys)
    # For the keys, all ranks share one sort of the sub-keys.
    queries = queries.contiguous()
    heads = torch.arange(num_heads, device=keys.device).unsqueeze(-1) * num_subkeys
    lines, num_lines = subkeys + heads, num_heads * num_subkeys
    entries = sort_entries(lines, num_lines)
    grad_keys = [
        table_gradient(queries, lines, grad, num_lines, keys.dtype, entries)
        for grad in grads.unbind(dim=-1)
    ]
    return grad_queries, torch.stack(grad_keys, dim=-1).view(keys.shape)


def _routing_keys(keys: Tensor, vector: Tensor) -> Tensor:
    """Keys ``[H, n, E]`` whose scores are a side's r scores times ``vector``, ``[H, r]``."""
    return (keys.float() * vector[:, None, None, :]).sum(dim=-1)


def _by_rank(keys: Tensor) -> Tensor:
    """``[H, n, r, E]``, each key in one piece; as UltraMem's norms leave them already."""
    return keys.movedim(-1, -2).contiguous()

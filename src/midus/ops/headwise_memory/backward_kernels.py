"""The backward pass of the head-wise memory layer, in Triton.

It starts from the slots and weights that the forward pass saved. `README.md` beside this file
derives it and counts bytes and operations.

Shape letters: T tokens, H heads, E query width, n sub-keys, K top_k, R latent, O head output.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, num_splits, power_of_two
from midus.ops.launch import Constants, launch
from midus.ops.product_key_topk.kernels import key_gradient_tile, key_tiles, query_gradients
from midus.ops.product_key_topk.search import query_rows
from midus.ops.streams import Beside
from midus.ops.weighted_gather.kernels import sort_entries, table_gradient

_SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _headwise_memory_bwd_kernel(
    grad_out, row_keys, col_keys, latent_values, value_proj, slot_idx, weights, grad_queries,
    grad_scores, latent, grad_latent, num_tokens,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    latent_dim: tl.constexpr, head_width: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``grad_score_k = weights_k * (g_k - sum_j weights_j g_j)``, g_k = <grad_out W^T, value_k>.

    From it the gradient of the queries; the retrieved latent and its gradient are written for
    the sums over tokens that follow (projection and table).
    """
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < num_tokens
    line = tokens * num_heads + head
    place = tl.arange(0, BLOCK_K)
    where = (line * TOP_K)[:, None] + place[None, :]
    chosen = mask[:, None] & (place < TOP_K)[None, :]
    slots = tl.load(slot_idx + where, mask=chosen, other=0)  # [T, K]
    alpha = tl.load(weights + where, mask=chosen, other=0.0)
    grad_alpha = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for start_r in range(0, latent_dim, BLOCK_R):
        r = start_r + tl.arange(0, BLOCK_R)
        real = mask[:, None] & (r < latent_dim)[None, :]
        grad_m = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for start_o in range(0, head_width, BLOCK_O):
            o = start_o + tl.arange(0, BLOCK_O)
            projection = tl.load(
                value_proj + (head * latent_dim + r)[:, None] * head_width + o[None, :],
                mask=(r < latent_dim)[:, None] & (o < head_width)[None, :],
                other=0.0,
            )  # [R, O]
            grad = tl.load(
                grad_out + line[:, None] * head_width + o[None, :],
                mask=mask[:, None] & (o < head_width)[None, :],
                other=0.0,
            )  # [T, O]
            grad_m = tl.dot(grad, tl.trans(projection), grad_m, input_precision="ieee")
        m = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for j in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
            slot = tl.load(slot_idx + line * TOP_K + j, mask=mask, other=0).to(tl.int64)
            weight = tl.load(weights + line * TOP_K + j, mask=mask, other=0.0)
            rows = tl.load(
                latent_values + slot[:, None] * latent_dim + r[None, :], mask=real, other=0.0
            ).to(tl.float32)
            m += weight[:, None] * rows
            product = tl.sum(grad_m * rows, axis=1)
            grad_alpha += tl.where(place[None, :] == j, product[:, None], 0.0)
        there = line[:, None] * latent_dim + r[None, :]
        tl.store(latent + there, m.to(latent.dtype.element_ty), mask=real)
        tl.store(grad_latent + there, grad_m.to(grad_latent.dtype.element_ty), mask=real)
    grads = alpha * (grad_alpha - tl.sum(alpha * grad_alpha, axis=1)[:, None])
    tl.store(grad_scores + where, grads, mask=chosen)
    query_gradients(
        grads, slots, row_keys, col_keys, grad_queries, line, head, mask,
        num_subkeys, subkey_dim, TOP_K, BLOCK_T, BLOCK_E, BLOCK_K, UNROLL,
    )  # fmt: skip


@triton.jit
def _projection_gradient_tile(
    latent, grad_out, partials, tile, head, first, last,
    num_heads: tl.constexpr, latent_dim: tl.constexpr, head_width: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """``grad_value_proj[h] = sum_t latent[t, h]^T grad_out[t, h]``, one tile of one head."""
    tiles_o: tl.constexpr = (head_width + BLOCK_O - 1) // BLOCK_O
    r = tile // tiles_o * BLOCK_R + tl.arange(0, BLOCK_R)
    o = tile % tiles_o * BLOCK_O + tl.arange(0, BLOCK_O)
    total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    for start in range(first, last, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        line = (tokens * num_heads + head)[:, None]
        m = tl.load(
            latent + line * latent_dim + r[None, :],
            mask=(tokens < last)[:, None] & (r < latent_dim)[None, :],
            other=0.0,
        )
        grad = tl.load(
            grad_out + line * head_width + o[None, :],
            mask=(tokens < last)[:, None] & (o < head_width)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(m), grad, total, input_precision="ieee")
    where = (head * latent_dim + r)[:, None] * head_width + o[None, :]
    tl.store(partials + where, total, mask=(r < latent_dim)[:, None] & (o < head_width)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_split"])
def _parameter_gradient_kernel(
    latent, grad_out, grad_scores, slot_idx, queries, partials, num_tokens, tokens_per_split,
    stride_token, stride_head,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    latent_dim: tl.constexpr, head_width: tl.constexpr, tiles_proj: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Sums over tokens of one head: ``latent^T grad_out`` and ``grad_scores^T queries``.

    One partial sum a split of the tokens: projections first, then row keys, then column keys.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, num_tokens)
    size_proj: tl.constexpr = num_heads * latent_dim * head_width
    size_keys: tl.constexpr = num_heads * num_subkeys * subkey_dim
    own = partials + split * (size_proj + 2 * size_keys)
    if tile < tiles_proj:
        _projection_gradient_tile(
            latent, grad_out, own, tile, head, first, last, num_heads, latent_dim, head_width,
            BLOCK_T, BLOCK_R, BLOCK_O,
        )  # fmt: skip
    else:
        key_gradient_tile(
            grad_scores, slot_idx, queries, own + size_proj, tile - tiles_proj, head, first, last,
            num_heads, num_subkeys, subkey_dim, stride_token, stride_head,
            TOP_K, BLOCK_T, BLOCK_N, BLOCK_E,
        )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _sum_splits_kernel(
    partials, grad_proj, grad_row, grad_col, splits,
    size_proj: tl.constexpr, size_keys: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``grad = sum over splits of partials``, in order, cast to each gradient's own type."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size: tl.constexpr = size_proj + 2 * size_keys
    total = tl.zeros([BLOCK], tl.float32)
    partial = partials + i
    for _ in range(splits):
        total += tl.load(partial, mask=i < size, other=0.0)
        partial += size
    tl.store(grad_proj + i, total.to(grad_proj.dtype.element_ty), mask=i < size_proj)
    i -= size_proj
    tl.store(grad_row + i, total.to(grad_row.dtype.element_ty), mask=(i >= 0) & (i < size_keys))
    i -= size_keys
    tl.store(grad_col + i, total.to(grad_col.dtype.element_ty), mask=(i >= 0) & (i < size_keys))


def headwise_memory_backward(
    grad_out: Tensor,
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    latent_values: Tensor,
    value_proj: Tensor,
    slot_idx: Tensor,
    weights: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, row keys, column keys, latent values and projections.

    ``needs`` says which of the five are wanted; the sums for parameters that are not wanted are
    left out, and their gradients are empty.
    """
    needs_table, needs_rest = needs[3], needs[1] or needs[2] or needs[4]
    grad_queries = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    queries = query_rows(queries)
    num_tokens, num_heads, _ = queries.shape
    top_k = slot_idx.shape[-1]
    num_subkeys, subkey_dim = row_keys.shape[1:]
    num_slots, latent_dim = latent_values.shape
    head_width = value_proj.shape[2]
    if not num_tokens:
        return (
            grad_queries,
            _zeros(row_keys, needs_rest),
            _zeros(col_keys, needs_rest),
            _zeros(latent_values, needs_table),
            _zeros(value_proj, needs_rest),
        )
    # The table's gradient is many short kernels, beside the others it costs little: the sort runs
    # while the next kernel does, the sums while those of the other parameters do.
    beside = Beside(slot_idx.device)
    entries = beside.run(sort_entries, slot_idx, num_slots) if needs_table else None
    grad_out = grad_out.contiguous()
    grad_scores = torch.empty_like(weights)
    latent = grad_out.new_empty((*grad_out.shape[:-1], latent_dim))
    grad_latent = torch.empty_like(latent)
    constants = _backward_constants(
        num_heads, num_subkeys, subkey_dim, latent_dim, head_width, top_k, grad_out.dtype
    )
    launch(
        _headwise_memory_bwd_kernel,
        (ceil_div(num_tokens, constants["BLOCK_T"]), num_heads),
        (
            grad_out,
            row_keys.contiguous(),
            col_keys.contiguous(),
            latent_values.contiguous(),
            value_proj.contiguous(),
            slot_idx,
            weights,
            grad_queries,
            grad_scores,
            latent,
            grad_latent,
            num_tokens,
        ),
        constants,
    )
    grad_values = latent_values.new_empty(0)
    if needs_table:
        grad_values = beside.run(
            table_gradient, grad_latent, slot_idx, weights, num_slots, latent_values.dtype, entries
        )
    rest = (row_keys.new_empty(0), col_keys.new_empty(0), value_proj.new_empty(0))
    if needs_rest:
        rest = _parameter_gradients(
            latent, grad_out, grad_scores, slot_idx, queries, row_keys, col_keys, value_proj
        )
    beside.join(grad_values)
    return grad_queries, *rest[:2], grad_values, rest[2]


def _zeros(tensor: Tensor, is_needed: bool) -> Tensor:
    return torch.zeros_like(tensor) if is_needed else tensor.new_empty(0)


def _parameter_gradients(
    latent: Tensor,
    grad_out: Tensor,
    grad_scores: Tensor,
    slot_idx: Tensor,
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_proj: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_heads, _ = queries.shape
    top_k = slot_idx.shape[-1]
    num_subkeys, subkey_dim = row_keys.shape[1:]
    latent_dim, head_width = value_proj.shape[1:]
    tiles, constants = _gradient_constants(
        num_heads, num_subkeys, subkey_dim, latent_dim, head_width, top_k
    )
    splits = num_splits(num_tokens, tiles * num_heads, constants["BLOCK_T"])
    size_proj, size_keys = value_proj.numel(), row_keys.numel()
    size = size_proj + 2 * size_keys
    partials = torch.empty((splits, size), dtype=torch.float32, device=latent.device)
    launch(
        _parameter_gradient_kernel,
        (tiles, num_heads, splits),
        (
            latent,
            grad_out,
            grad_scores,
            slot_idx,
            queries,
            partials,
            num_tokens,
            ceil_div(num_tokens, splits),
            *queries.stride()[:2],
        ),
        constants,
    )
    grad_proj = torch.empty_like(value_proj, memory_format=torch.contiguous_format)
    grad_row = torch.empty_like(row_keys, memory_format=torch.contiguous_format)
    grad_col = torch.empty_like(col_keys, memory_format=torch.contiguous_format)
    launch(
        _sum_splits_kernel,
        (ceil_div(size, _SUM_BLOCK),),
        (partials, grad_proj, grad_row, grad_col, splits),
        _sum_constants(size_proj, size_keys),
    )
    return grad_row, grad_col, grad_proj


@functools.cache
def _backward_constants(
    num_heads: int, num_subkeys: int, subkey_dim: int, latent_dim: int, head_width: int,
    top_k: int, dtype: torch.dtype,
) -> Constants:  # fmt: skip
    """Wider types leave room for fewer tokens."""
    is_wide = dtype == torch.float32
    constants = Constants(
        num_heads=num_heads,
        num_subkeys=num_subkeys,
        subkey_dim=subkey_dim,
        latent_dim=latent_dim,
        head_width=head_width,
        TOP_K=top_k,
        BLOCK_E=min(power_of_two(subkey_dim, 16), 64),
        BLOCK_K=power_of_two(top_k),
        UNROLL=min(top_k, 4),
        BLOCK_T=32 if is_wide else 64,
        BLOCK_R=min(power_of_two(latent_dim, 16), 64),
        BLOCK_O=min(power_of_two(head_width, 16), 128),
        num_warps=4,
        num_stages=1,
    )
    if not is_wide:  # three programs a multiprocessor instead of two, on an H100 and H200
        constants["maxnreg"] = 168
    return constants


@functools.cache
def _gradient_constants(
    num_heads: int, num_subkeys: int, subkey_dim: int, latent_dim: int, head_width: int, top_k: int
) -> tuple[int, Constants]:
    """Tiles of one head's projections and keys, and the constants of their sums."""
    block_r = min(power_of_two(latent_dim, 16), 64)
    block_o = min(power_of_two(head_width, 16), 128)
    tiles_proj = ceil_div(latent_dim, block_r) * ceil_div(head_width, block_o)
    tiles_keys, blocks = key_tiles(num_subkeys, subkey_dim)
    constants = Constants(
        num_heads=num_heads,
        num_subkeys=num_subkeys,
        subkey_dim=subkey_dim,
        latent_dim=latent_dim,
        head_width=head_width,
        tiles_proj=tiles_proj,
        TOP_K=top_k,
        BLOCK_R=block_r,
        BLOCK_O=block_o,
        **blocks,
    )
    return tiles_proj + tiles_keys, constants


@functools.cache
def _sum_constants(size_proj: int, size_keys: int) -> Constants:
    return Constants(size_proj=size_proj, size_keys=size_keys, BLOCK=_SUM_BLOCK)

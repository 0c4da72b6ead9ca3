"""The head-wise memory layer as one forward kernel, in Triton.

Paper, Section 4.2, Eq. 5. Scores, Top-k, softmax, gather, weighted sum and projection happen in
one program per (block of tokens, head). `README.md` beside this file derives it and counts bytes
and operations.

Shape letters: T tokens, H heads, E query width, n sub-keys, K top_k, R latent, O head output.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, power_of_two
from midus.ops.launch import Constants, launch
from midus.ops.product_key_topk.search import find_slots, query_rows, search_blocks, search_tokens


@triton.jit
def softmax(scores, place, TOP_K: tl.constexpr):
    """Over the k winners, which come best first; padding weighs nothing."""
    largest = tl.max(scores, axis=1)[:, None]
    powers = tl.where(place < TOP_K, tl.exp(scores - largest), 0.0)
    return powers / tl.sum(powers, axis=1)[:, None]


@triton.jit
def gather(
    table, slot_idx, weights, mask, r, width: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``sum_k weights[t, k] * table[slot_idx[t, k], r]`` in float32."""
    place = tl.arange(0, BLOCK_K)[None, :]
    real = mask[:, None] & (r < width)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for j in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        slot = tl.sum(tl.where(place == j, slot_idx, 0), axis=1).to(tl.int64)
        weight = tl.sum(tl.where(place == j, weights, 0.0), axis=1)
        rows = tl.load(table + slot[:, None] * width + r[None, :], mask=real, other=0.0)
        total += weight[:, None] * rows.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _headwise_memory_fwd_kernel(
    queries, row_keys, col_keys, latent_values, value_proj, out, slot_idx, weights, num_tokens,
    stride_token, stride_head,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    latent_dim: tl.constexpr, head_width: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr, CARTESIAN: tl.constexpr, SAVE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """``out[t, h] = (sum_k weights_k * latent_values[slot_k]) @ value_proj[h]``."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < num_tokens
    slots, scores = find_slots(
        queries, row_keys, col_keys, tokens, num_tokens, head, num_subkeys, subkey_dim,
        stride_token, stride_head, TOP_K, BLOCK_T, BLOCK_N, BLOCK_E, BLOCK_K, CARTESIAN, UNROLL,
    )  # fmt: skip
    place = tl.arange(0, BLOCK_K)
    alpha = softmax(scores, place[None, :], TOP_K)
    line = tokens * num_heads + head  # this head's line of a [T, H, ...] tensor
    if SAVE:
        where = (line * TOP_K)[:, None] + place[None, :]
        chosen = mask[:, None] & (place < TOP_K)[None, :]
        tl.store(slot_idx + where, slots, mask=chosen)
        tl.store(weights + where, alpha, mask=chosen)
    for start_o in range(0, head_width, BLOCK_O):
        o = start_o + tl.arange(0, BLOCK_O)
        result = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        for start_r in range(0, latent_dim, BLOCK_R):
            r = start_r + tl.arange(0, BLOCK_R)
            projection = tl.load(
                value_proj + (head * latent_dim + r)[:, None] * head_width + o[None, :],
                mask=(r < latent_dim)[:, None] & (o < head_width)[None, :],
                other=0.0,
            )  # [R, O]
            latent = gather(
                latent_values, slots, alpha, mask, r, latent_dim,
                TOP_K, BLOCK_T, BLOCK_R, BLOCK_K, UNROLL,
            )  # fmt: skip
            result = tl.dot(latent.to(projection.dtype), projection, result, input_precision="ieee")
        tl.store(
            out + line[:, None] * head_width + o[None, :],
            result.to(out.dtype.element_ty),
            mask=mask[:, None] & (o < head_width)[None, :],
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _headwise_memory_cached_kernel(
    queries, row_keys, col_keys, value_cache, out, num_tokens, stride_token, stride_head,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    head_width: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr, CARTESIAN: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """``out[t, h] = sum_k weights_k * value_cache[h, slot_k]``."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = tokens < num_tokens
    slots, scores = find_slots(
        queries, row_keys, col_keys, tokens, num_tokens, head, num_subkeys, subkey_dim,
        stride_token, stride_head, TOP_K, BLOCK_T, BLOCK_N, BLOCK_E, BLOCK_K, CARTESIAN, UNROLL,
    )  # fmt: skip
    alpha = softmax(scores, tl.arange(0, BLOCK_K)[None, :], TOP_K)
    table = value_cache + head * num_subkeys * num_subkeys * head_width
    for start in range(0, head_width, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        result = gather(
            table, slots, alpha, mask, o, head_width, TOP_K, BLOCK_T, BLOCK_O, BLOCK_K, UNROLL
        )
        tl.store(
            out + (tokens * num_heads + head)[:, None] * head_width + o[None, :],
            result.to(out.dtype.element_ty),
            mask=mask[:, None] & (o < head_width)[None, :],
        )


def headwise_memory_forward(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    latent_values: Tensor,
    value_proj: Tensor,
    top_k: int,
    cartesian: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[..., H, O]``, and slots and weights ``[..., H, K]`` where they are saved."""
    lines = queries.shape[:-1]
    queries = query_rows(queries)
    num_tokens, num_heads, _ = queries.shape
    num_subkeys, subkey_dim = row_keys.shape[1:]
    latent_dim, head_width = value_proj.shape[1:]
    device = queries.device
    out = torch.empty((*lines, head_width), dtype=value_proj.dtype, device=device)
    shape = (*lines, top_k) if save else (0,)
    slot_idx = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    if not num_tokens:
        return out, slot_idx, weights
    block_t = 1 if cartesian else search_tokens(num_tokens, num_subkeys, top_k)
    launch(
        _headwise_memory_fwd_kernel,
        (ceil_div(num_tokens, block_t), num_heads),
        (
            queries,
            row_keys.contiguous(),
            col_keys.contiguous(),
            latent_values.contiguous(),
            value_proj.contiguous(),
            out,
            slot_idx,
            weights,
            num_tokens,
            *queries.stride()[:2],
        ),
        _forward_constants(
            num_heads, num_subkeys, subkey_dim, latent_dim, head_width, top_k, cartesian, save,
            block_t,
        ),
    )  # fmt: skip
    return out, slot_idx, weights


def headwise_memory_cached_forward(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    cartesian: bool,
) -> Tensor:
    """Output ``[..., H, O]`` from a table of realized values a head."""
    lines = queries.shape[:-1]
    queries = query_rows(queries)
    num_tokens, num_heads, _ = queries.shape
    num_subkeys, subkey_dim = row_keys.shape[1:]
    head_width = value_cache.shape[2]
    out = torch.empty((*lines, head_width), dtype=value_cache.dtype, device=queries.device)
    if not num_tokens:
        return out
    block_t = 1 if cartesian else search_tokens(num_tokens, num_subkeys, top_k)
    launch(
        _headwise_memory_cached_kernel,
        (ceil_div(num_tokens, block_t), num_heads),
        (
            queries,
            row_keys.contiguous(),
            col_keys.contiguous(),
            value_cache.contiguous(),
            out,
            num_tokens,
            *queries.stride()[:2],
        ),
        _cached_constants(
            num_heads, num_subkeys, subkey_dim, head_width, top_k, cartesian, block_t
        ),
    )
    return out


@functools.cache
def _forward_constants(
    num_heads: int, num_subkeys: int, subkey_dim: int, latent_dim: int, head_width: int,
    top_k: int, cartesian: bool, save: bool, block_t: int,
) -> Constants:  # fmt: skip
    return Constants(
        num_heads=num_heads,
        num_subkeys=num_subkeys,
        subkey_dim=subkey_dim,
        latent_dim=latent_dim,
        head_width=head_width,
        CARTESIAN=cartesian,
        SAVE=save,
        BLOCK_T=block_t,
        BLOCK_R=min(power_of_two(latent_dim, 16), 128),
        BLOCK_O=min(power_of_two(head_width, 16), 128),
        num_warps=4,
        **search_blocks(num_subkeys, subkey_dim, top_k),
    )


@functools.cache
def _cached_constants(
    num_heads: int, num_subkeys: int, subkey_dim: int, head_width: int, top_k: int,
    cartesian: bool, block_t: int,
) -> Constants:  # fmt: skip
    return Constants(
        num_heads=num_heads,
        num_subkeys=num_subkeys,
        subkey_dim=subkey_dim,
        head_width=head_width,
        CARTESIAN=cartesian,
        BLOCK_T=block_t,
        BLOCK_O=min(power_of_two(head_width, 16), 128),
        **search_blocks(num_subkeys, subkey_dim, top_k),
    )

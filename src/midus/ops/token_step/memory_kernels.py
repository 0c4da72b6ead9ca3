"""One token's way through the memory after its attention, in one kernel.

`read`: the parts of `attend` put together, product-key Top-k, the values of the winners, and the
residual added.

Shape letters: B sequences, D hidden, H heads, E head width, S parts, n sub-keys, K top_k, O head
output.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import power_of_two
from midus.ops.headwise_memory.forward_kernels import gather, softmax
from midus.ops.launch import Constants, launch
from midus.ops.product_key_topk.search import cartesian_topk, search_blocks, two_stage_topk
from midus.ops.token_step.attention_kernels import after_sums, attend, attended, part_weights
from midus.ops.token_step.early import begin, early


@triton.jit
def _key_tile(
    keys, start, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's row or column keys, ``[n, E]``."""
    subkey, e = tl.arange(0, BLOCK_N)[:, None], start + tl.arange(0, BLOCK_E)[None, :]
    real = (subkey < num_subkeys) & (e < subkey_dim)
    return tl.load(keys + subkey * subkey_dim + e, mask=real, other=0.0)


@triton.jit
def _half_scores(
    sums, weights, line, keys, tile, dtype: tl.constexpr, offset: tl.constexpr,
    width: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Scores of one half of a head's query with its sub-keys, ``[1, n]``; ``tile``: the first."""
    subkey = tl.arange(0, BLOCK_N)
    scores = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, subkey_dim, BLOCK_E):
        if start > 0:
            tile = _key_tile(keys, start, num_subkeys, subkey_dim, BLOCK_N, BLOCK_E)
        e = start + tl.arange(0, BLOCK_E)
        query = attended(sums, weights, line, offset + e, width, NUM_PARTS, BLOCK_S)
        # As the attention would have handed it on.
        query = tl.where(e < subkey_dim, query.to(dtype).to(tl.float32), 0.0)
        scores += tl.sum(tile.to(tl.float32) * query[None, :], axis=1)
    scores = tl.where(scores != scores, float("inf"), scores)  # as in `subkey_scores`
    return tl.where(subkey < num_subkeys, scores, -float("inf"))[None, :]


@triton.jit
def _read_kernel(
    sums, hidden, row_keys, col_keys, value_cache, out, position,
    num_heads: tl.constexpr, num_subkeys: tl.constexpr, subkey_dim: tl.constexpr,
    head_width: tl.constexpr, NUM_PARTS: tl.constexpr, CARTESIAN: tl.constexpr,
    HAS_POSITION: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one token: ``out = hidden + sum_k weights_k * value_cache[h, slot_k]``."""
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = batch * num_heads + head
    dtype: tl.constexpr = hidden.dtype.element_ty
    width: tl.constexpr = 2 * subkey_dim
    row_keys += head * num_subkeys * subkey_dim
    col_keys += head * num_subkeys * subkey_dim
    row_tile = _key_tile(row_keys, 0, num_subkeys, subkey_dim, BLOCK_N, BLOCK_E)
    col_tile = _key_tile(col_keys, 0, num_subkeys, subkey_dim, BLOCK_N, BLOCK_E)
    begin(EARLY)
    largest, totals = after_sums(sums, tl.num_programs(0) * num_heads, width, NUM_PARTS)
    parts = part_weights(largest, totals, line, NUM_PARTS, BLOCK_S)
    row_scores = _half_scores(
        sums, parts, line, row_keys, row_tile, dtype, 0, width, num_subkeys, subkey_dim,
        NUM_PARTS, BLOCK_S, BLOCK_N, BLOCK_E,
    )  # fmt: skip
    col_scores = _half_scores(
        sums, parts, line, col_keys, col_tile, dtype, subkey_dim, width, num_subkeys, subkey_dim,
        NUM_PARTS, BLOCK_S, BLOCK_N, BLOCK_E,
    )  # fmt: skip
    if CARTESIAN:
        slots, scores = cartesian_topk(row_scores, col_scores, num_subkeys, TOP_K, BLOCK_K, UNROLL)
    else:
        slots, scores = two_stage_topk(row_scores, col_scores, num_subkeys, TOP_K, BLOCK_K, UNROLL)
    alpha = softmax(scores, tl.arange(0, BLOCK_K)[None, :], TOP_K)
    table = value_cache + head.to(tl.int64) * num_subkeys * num_subkeys * head_width
    one = tl.arange(0, 1)
    for start in range(0, head_width, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        where = (line * head_width + o)[None, :]
        real = (o < head_width)[None, :]
        correction = gather(
            table, slots, alpha, one == 0, o, head_width, TOP_K, 1, BLOCK_O, BLOCK_K, UNROLL
        )  # [1, O]
        stream = tl.load(hidden + where, mask=real, other=0.0).to(tl.float32)
        tl.store(out + where, (stream + correction.to(dtype)).to(dtype), mask=real)
    if HAS_POSITION:  # a constant; what follows is not
        tl.store(position, tl.load(position) + 1, mask=line == 0)


def attend_and_read(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
    hidden: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    cartesian: bool,
    past: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``hidden`` ``[B, ..., D]`` with the memory's correction; counts ``length`` up if a tensor."""
    sums, parts = attend(queries, keys, values, length, mask, scale, past)
    hidden = hidden.contiguous()
    num_heads, num_subkeys, subkey_dim = row_keys.shape
    is_tensor = isinstance(length, Tensor)
    out = torch.empty_like(hidden)
    launch(
        _read_kernel,
        (hidden.shape[0], num_heads),
        (
            sums,
            hidden,
            row_keys,
            col_keys,
            value_cache,
            out,
            length if is_tensor else hidden,
        ),
        _read_constants(
            num_heads,
            num_subkeys,
            subkey_dim,
            value_cache.shape[2],
            top_k,
            cartesian,
            is_tensor,
            parts,
            hidden.device,
        ),
    )
    return out


@functools.cache
def _read_constants(
    num_heads: int, num_subkeys: int, subkey_dim: int, head_width: int, top_k: int,
    cartesian: bool, has_position: bool, parts: int, device: torch.device,
) -> Constants:  # fmt: skip
    return Constants(
        num_heads=num_heads,
        num_subkeys=num_subkeys,
        subkey_dim=subkey_dim,
        head_width=head_width,
        CARTESIAN=cartesian,
        HAS_POSITION=has_position,
        NUM_PARTS=parts,
        BLOCK_S=power_of_two(parts),
        BLOCK_O=min(power_of_two(head_width, 16), 128),
        num_warps=2,
        **search_blocks(num_subkeys, subkey_dim, top_k),
        **early(device),
    )

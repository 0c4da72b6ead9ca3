"""One token through a block in a few Triton kernels, for decoding.

A memory block is three of them. `project`: norm, q/k/v projections and rotary embeddings, keys and
values written where the cache wants them. `attend`: attention over the cache, cut into parts that
run side by side. `read`: the parts put together, product-key Top-k, the values of the winners, and
the residual added. A block of the base is six: `project`, `attend`, `combine`, `linear` (output
projection and residual), `gate` (norm, gate and up projections, SiLU), `linear`. Attention and
reading take a batch, products with weights one token. `README.md` beside this file counts bytes.

Shape letters: B sequences, D hidden, H heads, V key-value heads, E head width, L cache slots,
S parts, n sub-keys, K top_k, O head output.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, power_of_two
from midus.ops.headwise_memory.kernels import gather, softmax
from midus.ops.launch import Constants, launch
from midus.ops.product_key_topk.kernels import cartesian_topk, search_blocks, two_stage_topk
from midus.ops.rotary.kernels import rotate_pairs

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4: never called, see `_early`
    gdc_launch_dependents = gdc_wait = None

# Programs that attention is cut into: for caches up to so many slots, and for longer ones.
_SHORT, _PROGRAMS_SHORT, _PROGRAMS = 1024, 64, 256
_BLOCK_L = 32
# Rows and columns of a weight that one program has in flight.
PROJECT_BLOCKS = {"BLOCK_P": 8, "BLOCK_D": 512, "num_warps": 4}
GATE_BLOCKS = {"BLOCK_P": 1, "BLOCK_D": 2048, "num_warps": 8}
LINEAR_BLOCKS = {"BLOCK_P": 1, "BLOCK_D": 1024, "num_warps": 4}
LONG_LINEAR_BLOCKS = {"BLOCK_P": 1, "BLOCK_D": 2048, "num_warps": 8}
_LONG_LINEAR = 8192


@triton.jit
def _begin(EARLY: tl.constexpr):
    """Ends what may run before the kernel before this one has ended: reading weights.

    From here on its results are there, and the kernel after this one may begin likewise.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _project_kernel(
    hidden, norm_weight, query_weight, key_weight, value_weight,
    query_bias, key_bias, value_bias, cos, sin, queries, keys, values, position, eps,
    stride_key, stride_key_head, stride_value, stride_value_head,
    hidden_size: tl.constexpr, num_heads: tl.constexpr, num_kv_heads: tl.constexpr,
    half: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITION: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some pairs ``(i, i + E/2)`` of one head's output."""
    head = tl.program_id(1)
    is_query = head < num_heads
    is_value = head >= num_heads + num_kv_heads
    own = tl.where(is_query, head, (head - num_heads) % num_kv_heads).to(tl.int64)
    weight = tl.where(is_query, query_weight, tl.where(is_value, value_weight, key_weight))
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    rows = weight + (own * 2 * half + pair)[:, None].to(tl.int64) * hidden_size + d[None, :]
    real = (pair < half)[:, None]
    first = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    second = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    squares = tl.zeros([BLOCK_D], tl.float32)
    tile = real & (d < hidden_size)[None, :]
    w_first = tl.load(rows, mask=tile, other=0.0)
    w_second = tl.load(rows + half * hidden_size, mask=tile, other=0.0)
    _begin(EARLY)
    for start in range(0, hidden_size, BLOCK_D):
        here = start + d < hidden_size
        x = tl.load(hidden + start + d, mask=here, other=0.0).to(tl.float32)
        scaled = x * tl.load(norm_weight + start + d, mask=here, other=0.0).to(tl.float32)
        squares += x * x
        first += w_first.to(tl.float32) * scaled[None, :]
        second += w_second.to(tl.float32) * scaled[None, :]
        after = start + BLOCK_D
        tile = real & (after + d < hidden_size)[None, :]
        w_first = tl.load(rows + after, mask=tile, other=0.0)
        w_second = tl.load(rows + half * hidden_size + after, mask=tile, other=0.0)
    # The norm is one factor for the whole token: it can wait until the sums are there.
    factor = tl.rsqrt(tl.sum(squares) / hidden_size + eps)
    y_first, y_second = tl.sum(first, axis=1) * factor, tl.sum(second, axis=1) * factor
    mask = pair < half
    where = own * 2 * half + pair
    if HAS_BIAS:
        bias = tl.where(is_query, query_bias, tl.where(is_value, value_bias, key_bias))
        y_first += tl.load(bias + where, mask=mask, other=0.0).to(tl.float32)
        y_second += tl.load(bias + where + half, mask=mask, other=0.0).to(tl.float32)
    dtype = queries.dtype.element_ty
    y_first, y_second = y_first.to(dtype), y_second.to(dtype)
    slot = tl.load(position) if HAS_POSITION else 0
    if is_value:
        out = values + slot * stride_value + own * stride_value_head + pair
        tl.store(out, y_first, mask=mask)
        tl.store(out + half, y_second, mask=mask)
    else:
        cos_first = tl.load(cos + pair, mask=mask).to(tl.float32)
        sin_first = tl.load(sin + pair, mask=mask).to(tl.float32)
        cos_second = tl.load(cos + half + pair, mask=mask).to(tl.float32)
        sin_second = tl.load(sin + half + pair, mask=mask).to(tl.float32)
        y_first, y_second = rotate_pairs(
            y_first, y_second, cos_first, sin_first, cos_second, sin_second, False
        )
        out = tl.where(
            is_query, queries + where, keys + slot * stride_key + own * stride_key_head + pair
        )
        tl.store(out, y_first, mask=mask)
        tl.store(out + half, y_second, mask=mask)


@triton.jit
def _gate_kernel(
    hidden, norm_weight, gate_weight, up_weight, out, eps,
    hidden_size: tl.constexpr, width: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``silu(W_gate norm(x)) * W_up norm(x)``, some rows of it."""
    row = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    where = row[:, None].to(tl.int64) * hidden_size + d[None, :]
    gate = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    up = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    squares = tl.zeros([BLOCK_D], tl.float32)
    real = (row < width)[:, None]
    tile = real & (d < hidden_size)[None, :]
    w_gate = tl.load(gate_weight + where, mask=tile, other=0.0)
    w_up = tl.load(up_weight + where, mask=tile, other=0.0)
    _begin(EARLY)
    for start in range(0, hidden_size, BLOCK_D):
        here = start + d < hidden_size
        x = tl.load(hidden + start + d, mask=here, other=0.0).to(tl.float32)
        scaled = x * tl.load(norm_weight + start + d, mask=here, other=0.0).to(tl.float32)
        squares += x * x
        gate += w_gate.to(tl.float32) * scaled[None, :]
        up += w_up.to(tl.float32) * scaled[None, :]
        after = start + BLOCK_D
        tile = real & (after + d < hidden_size)[None, :]
        w_gate = tl.load(gate_weight + where + after, mask=tile, other=0.0)
        w_up = tl.load(up_weight + where + after, mask=tile, other=0.0)
    factor = tl.rsqrt(tl.sum(squares) / hidden_size + eps)
    dtype = out.dtype.element_ty
    opened = (tl.sum(gate, axis=1) * factor).to(dtype).to(tl.float32)
    raised = (tl.sum(up, axis=1) * factor).to(dtype).to(tl.float32)
    opened = (opened * tl.sigmoid(opened)).to(dtype).to(tl.float32)
    tl.store(out + row, (opened * raised).to(dtype), mask=row < width)


@triton.jit
def _linear_kernel(
    inputs, weight, residual, out,
    in_size: tl.constexpr, out_size: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``residual + W x``, some rows of it."""
    row = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    where = row[:, None].to(tl.int64) * in_size + d[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    real = (row < out_size)[:, None]
    w = tl.load(weight + where, mask=real & (d < in_size)[None, :], other=0.0)
    _begin(EARLY)
    for start in range(0, in_size, BLOCK_D):
        x = tl.load(inputs + start + d, mask=start + d < in_size, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
        after = start + BLOCK_D
        tile = real & (after + d < in_size)[None, :]
        w = tl.load(weight + where + after, mask=tile, other=0.0)
    mask = row < out_size
    dtype = out.dtype.element_ty
    stream = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row, (stream + tl.sum(total, axis=1).to(dtype)).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["length"])
def _attend_kernel(
    queries, keys, values, mask, position, sums, largest, totals, length, scale,
    stride_query, stride_query_head, stride_batch, stride_head, stride_slot,
    stride_value_batch, stride_value_head, stride_value_slot, stride_mask,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, width: tl.constexpr,
    NUM_PARTS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_POSITION: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_L: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of the cache for the heads that share a key-value head."""
    batch = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    part = tl.program_id(1)
    _begin(EARLY)
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
        k = tl.load(
            keys + batch * stride_batch + kv_head * stride_head + rows * stride_slot + e[None, :],
            mask=tile, other=0.0,
        )  # fmt: skip
        v = tl.load(
            values + batch * stride_value_batch + kv_head * stride_value_head
            + rows * stride_value_slot + e[None, :],
            mask=tile, other=0.0,
        )  # fmt: skip
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
    tl.store(largest + line, best, mask=group < groups)
    tl.store(totals + line, total, mask=group < groups)
    tl.store(sums + line[:, None] * width + e[None, :], summed, mask=shown)


@triton.jit
def _part_weights(largest, totals, line, NUM_PARTS: tl.constexpr, BLOCK_S: tl.constexpr):
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
def _attended(
    sums, weights, line, e, width: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_S: tl.constexpr
):
    """The head's attention output at ``e`` in float32."""
    part = tl.arange(0, BLOCK_S)[:, None]
    real = (part < NUM_PARTS) & (e < width)[None, :]
    summed = tl.load(sums + (line * NUM_PARTS + part) * width + e[None, :], mask=real, other=0.0)
    return tl.sum(summed * weights[:, None], axis=0)


@triton.jit
def _combine_kernel(
    sums, largest, totals, out, position, width: tl.constexpr, COUNT: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attention output of one head."""
    line = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    _begin(EARLY)
    weights = _part_weights(largest, totals, line, NUM_PARTS, BLOCK_S)
    result = _attended(sums, weights, line, e, width, NUM_PARTS, BLOCK_S)
    tl.store(out + line * width + e, result.to(out.dtype.element_ty), mask=e < width)
    if COUNT:
        tl.store(position, tl.load(position) + 1, mask=line == 0)


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
        query = _attended(sums, weights, line, offset + e, width, NUM_PARTS, BLOCK_S)
        # As the attention would have handed it on.
        query = tl.where(e < subkey_dim, query.to(dtype).to(tl.float32), 0.0)
        scores += tl.sum(tile.to(tl.float32) * query[None, :], axis=1)
    scores = tl.where(scores != scores, float("inf"), scores)  # as in `subkey_scores`
    return tl.where(subkey < num_subkeys, scores, -float("inf"))[None, :]


@triton.jit
def _read_kernel(
    sums, largest, totals, hidden, row_keys, col_keys, value_cache, out, position,
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
    _begin(EARLY)
    parts = _part_weights(largest, totals, line, NUM_PARTS, BLOCK_S)
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


def project_token(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor | None,
) -> Tensor:
    """Queries ``[1, H, E]`` of ONE token; key and value go to slot ``position``."""
    width = cos.shape[-1]
    num_heads, num_kv_heads = weights[0].shape[0] // width, keys.shape[1]
    constants = _project_constants(
        hidden.shape[-1],
        num_heads,
        num_kv_heads,
        width,
        biases[0] is not None,
        position is not None,
        hidden.device,
    )
    hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
    queries = hidden.new_empty(1, num_heads, width)
    launch(
        _project_kernel,
        (ceil_div(width // 2, constants["BLOCK_P"]), num_heads + 2 * num_kv_heads),
        (
            hidden,
            norm_weight,
            *weights,
            *(hidden if bias is None else bias for bias in biases),
            cos,
            sin,
            queries,
            keys,
            values,
            hidden if position is None else position,
            eps,
            keys.stride(2),
            keys.stride(1),
            values.stride(2),
            values.stride(1),
        ),
        constants,
    )
    return queries


def gate_token(
    hidden: Tensor, norm_weight: Tensor, eps: float, gate_weight: Tensor, up_weight: Tensor
) -> Tensor:
    """``silu(W_gate norm(x)) * W_up norm(x)`` of ONE token: ``[..., I]``."""
    width, hidden_size = gate_weight.shape
    constants = _gate_constants(hidden_size, width, hidden.device)
    hidden = hidden.contiguous()
    out = hidden.new_empty(*hidden.shape[:-1], width)
    launch(
        _gate_kernel,
        (ceil_div(width, constants["BLOCK_P"]),),
        (hidden, norm_weight, gate_weight, up_weight, out, eps),
        constants,
    )
    return out


def linear_token(inputs: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """``residual + W x`` of ONE token: ``[..., O]``."""
    out_size, in_size = weight.shape
    constants = _linear_constants(in_size, out_size, inputs.device)
    inputs, residual = inputs.contiguous(), residual.contiguous()
    out = torch.empty_like(residual)
    launch(
        _linear_kernel,
        (ceil_div(out_size, constants["BLOCK_P"]),),
        (inputs, weight, residual, out),
        constants,
    )
    return out


class Parts:
    """What `attend` leaves for the kernels after it: one sum a head and part of the cache."""

    def __init__(self, batch: int, num_heads: int, width: int, num_parts: int, like: Tensor):
        size = batch * num_heads * num_parts
        memory = torch.empty(size * (width + 2), dtype=torch.float32, device=like.device)
        self.num_parts = num_parts
        self.sums = memory[: size * width]
        self.largest, self.totals = memory[size * width :].split(size)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
) -> Parts:
    """Attention of ``[B, H, E]`` over ``[B, V, L, E]``, in parts.

    ``length`` counts the slots in use; as a tensor, those before this token's.
    """
    batch, num_heads, width = queries.shape
    num_kv_heads, num_slots = keys.shape[1:3]
    parts = num_parts(batch * num_kv_heads, num_slots)
    held = Parts(batch, num_heads, width, parts, queries)
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
            queries if mask is None else mask,
            length if is_tensor else queries,
            held.sums,
            held.largest,
            held.totals,
            0 if is_tensor else length,
            scale,
            *queries.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            0 if mask is None else mask.stride(0),
        ),
        _attend_constants(
            num_heads, num_kv_heads, width, parts, mask is not None, is_tensor, queries.device
        ),
    )
    return held


def num_parts(num_lines: int, num_slots: int) -> int:
    """Into how many parts to cut the caches of ``num_lines`` sequences and key-value heads.

    Two numbers for any length, since a kernel is compiled for each; short caches leave some of the
    parts empty.
    """
    programs = _PROGRAMS_SHORT if num_slots <= _SHORT else _PROGRAMS
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
    held = attend(queries, keys, values, length, mask, scale)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    launch(
        _combine_kernel,
        (batch * num_heads,),
        (held.sums, held.largest, held.totals, out, length if count else out),
        _combine_constants(width, count, held.num_parts, queries.device),
    )
    return out


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
) -> Tensor:
    """``hidden`` ``[B, D]`` with the memory's correction; counts ``length`` up if a tensor."""
    held = attend(queries, keys, values, length, mask, scale)
    hidden = hidden.contiguous()
    num_heads, num_subkeys, subkey_dim = row_keys.shape
    is_tensor = isinstance(length, Tensor)
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    launch(
        _read_kernel,
        (hidden.shape[0], num_heads),
        (
            held.sums,
            held.largest,
            held.totals,
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
            held.num_parts,
            hidden.device,
        ),
    )
    return out


@functools.cache
def _project_constants(
    hidden_size: int, num_heads: int, num_kv_heads: int, width: int, has_bias: bool,
    has_position: bool, device: torch.device,
) -> Constants:  # fmt: skip
    return Constants(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        half=width // 2,
        HAS_BIAS=has_bias,
        HAS_POSITION=has_position,
        **_fitted(PROJECT_BLOCKS, hidden_size),
        **_early(device),
    )


@functools.cache
def _gate_constants(hidden_size: int, width: int, device: torch.device) -> Constants:
    blocks = _fitted(GATE_BLOCKS, hidden_size)
    return Constants(hidden_size=hidden_size, width=width, **blocks, **_early(device))


@functools.cache
def _linear_constants(in_size: int, out_size: int, device: torch.device) -> Constants:
    blocks = _fitted(LINEAR_BLOCKS if in_size < _LONG_LINEAR else LONG_LINEAR_BLOCKS, in_size)
    return Constants(in_size=in_size, out_size=out_size, **blocks, **_early(device))


@functools.cache
def _attend_constants(
    num_heads: int, num_kv_heads: int, width: int, parts: int, has_mask: bool, has_position: bool,
    device: torch.device,
) -> Constants:  # fmt: skip
    return Constants(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        NUM_PARTS=parts,
        HAS_MASK=has_mask,
        HAS_POSITION=has_position,
        BLOCK_G=power_of_two(num_heads // num_kv_heads, 16),
        BLOCK_E=power_of_two(width, 16),
        BLOCK_L=_BLOCK_L,
        **_early(device),
    )


@functools.cache
def _combine_constants(width: int, count: bool, parts: int, device: torch.device) -> Constants:
    return Constants(
        width=width,
        COUNT=count,
        NUM_PARTS=parts,
        BLOCK_S=power_of_two(parts),
        BLOCK_E=power_of_two(width),
        **_early(device),
    )


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
        **_early(device),
    )


def _early(device: torch.device) -> dict[str, bool]:
    """Whether a kernel may begin before the one before it has ended, from Hopper on."""
    is_early = (
        device.type == "cuda"
        and gdc_wait is not None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return {"EARLY": True, "launch_pdl": True} if is_early else {"EARLY": False}


def _fitted(blocks: dict[str, int], size: int) -> dict[str, int]:
    return {**blocks, "BLOCK_D": min(power_of_two(size), blocks["BLOCK_D"])}

"""One token times weights, in a kernel each: what decoding spends its time on.

`project`: norm, q/k/v projections and rotary embeddings, keys and values written where the cache
wants them. `linear`: a projection and the residual. `gate`: norm, gate and up projections, SiLU.
They take one token. `README.md` beside this file says how they follow each other and counts bytes.

Shape letters: D hidden, H heads, V key-value heads, E head width, L cache slots.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, power_of_two
from midus.ops.launch import Constants, launch
from midus.ops.rotary.kernels import rotate_pairs
from midus.ops.token_step.early import begin, early

# Rows and columns of a weight that one program has in flight.
PROJECT_BLOCKS = {"BLOCK_P": 8, "BLOCK_D": 512, "num_warps": 4}
GATE_BLOCKS = {"BLOCK_P": 1, "BLOCK_D": 2048, "num_warps": 8}
LINEAR_BLOCKS = {"BLOCK_P": 1, "BLOCK_D": 1024, "num_warps": 4}
LONG_LINEAR_BLOCKS = {"BLOCK_P": 1, "BLOCK_D": 2048, "num_warps": 8}
_LONG_LINEAR = 8192


@triton.jit(do_not_specialize=["number"])
def _project_kernel(
    hidden, norm_weight, query_weight, key_weight, value_weight,
    query_bias, key_bias, value_bias, cos, sin, queries, keys, values, position, number, eps,
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
    begin(EARLY)
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
    slot = tl.load(position) if HAS_POSITION else number.to(tl.int64)
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
    begin(EARLY)
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
    begin(EARLY)
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
    position: int | Tensor,
) -> Tensor:
    """Queries ``[1, H, E]`` of ONE token; key and value go to slot ``position``."""
    width = cos.shape[-1]
    num_heads, num_kv_heads = weights[0].shape[0] // width, keys.shape[1]
    has_bias = biases[0] is not None
    is_tensor = isinstance(position, Tensor)
    constants = _project_constants(
        hidden.shape[-1],
        num_heads,
        num_kv_heads,
        width,
        has_bias,
        is_tensor,
        hidden.device,
    )
    hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
    queries = hidden.new_empty(1, num_heads, width)
    _, key_head, key_slot, _ = keys.stride()
    _, value_head, value_slot, _ = values.stride()
    launch(
        _project_kernel,
        (ceil_div(width // 2, constants["BLOCK_P"]), num_heads + 2 * num_kv_heads),
        (
            hidden,
            norm_weight,
            *weights,
            *(biases if has_bias else (hidden, hidden, hidden)),
            cos,
            sin,
            queries,
            keys,
            values,
            position if is_tensor else hidden,
            0 if is_tensor else position,
            eps,
            key_slot,
            key_head,
            value_slot,
            value_head,
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
        **early(device),
    )


@functools.cache
def _gate_constants(hidden_size: int, width: int, device: torch.device) -> Constants:
    blocks = _fitted(GATE_BLOCKS, hidden_size)
    return Constants(hidden_size=hidden_size, width=width, **blocks, **early(device))


@functools.cache
def _linear_constants(in_size: int, out_size: int, device: torch.device) -> Constants:
    blocks = _fitted(LINEAR_BLOCKS if in_size < _LONG_LINEAR else LONG_LINEAR_BLOCKS, in_size)
    return Constants(in_size=in_size, out_size=out_size, **blocks, **early(device))


def _fitted(blocks: dict[str, int], size: int) -> dict[str, int]:
    return {**blocks, "BLOCK_D": min(power_of_two(size), blocks["BLOCK_D"])}

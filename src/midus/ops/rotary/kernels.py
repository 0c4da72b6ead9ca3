"""Rotary position embeddings of queries and keys in one Triton kernel, and their gradient.

In eager PyTorch they are ten passes over the queries; here each number is read and written once.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import power_of_two
from midus.ops.launch import Constants, launch


@triton.jit
def rotate_pairs(first, second, cos, sin, cos_second, sin_second, INVERSE: tl.constexpr):
    """Both halves turned; products are rounded to the tensors' type, as separate steps would."""
    dtype = first.dtype
    wide: tl.constexpr = tl.float32
    if INVERSE:
        a = (first.to(wide) * cos).to(dtype).to(wide) + (second.to(wide) * sin_second).to(dtype)
        b = (second.to(wide) * cos_second).to(dtype).to(wide) - (first.to(wide) * sin).to(dtype)
    else:
        a = (first.to(wide) * cos).to(dtype).to(wide) - (second.to(wide) * sin).to(dtype)
        b = (second.to(wide) * cos_second).to(dtype).to(wide) + (first.to(wide) * sin_second).to(
            dtype
        )
    return a.to(dtype), b.to(dtype)


@triton.jit
def _rotate(
    source, target, token, cos, sin, cos_second, sin_second, stride_token, stride_head,
    num_heads: tl.constexpr, half: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    heads, e = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_E)[None, :]
    real = (heads < num_heads) & (e < half)
    start = source + token * stride_token + heads * stride_head + e
    first, second = tl.load(start, mask=real), tl.load(start + half, mask=real)
    first, second = rotate_pairs(first, second, cos, sin, cos_second, sin_second, INVERSE)
    out = target + (token * num_heads + heads) * 2 * half + e
    tl.store(out, first, mask=real)
    tl.store(out + half, second, mask=real)


@triton.jit(do_not_specialize=["num_positions"])
def _rotate_kernel(
    queries, keys, cos, sin, queries_out, keys_out, num_positions,
    stride_query, stride_query_head, stride_key, stride_key_head,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, half: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_E: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """One token's queries and keys."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)[None, :]
    # Rows of the tables are the positions of one sequence, or of each.
    where = (token % num_positions) * 2 * half + e
    cos_first = tl.load(cos + where, mask=e < half).to(tl.float32)
    sin_first = tl.load(sin + where, mask=e < half).to(tl.float32)
    cos_second = tl.load(cos + where + half, mask=e < half).to(tl.float32)
    sin_second = tl.load(sin + where + half, mask=e < half).to(tl.float32)
    _rotate(
        queries, queries_out, token, cos_first, sin_first, cos_second, sin_second,
        stride_query, stride_query_head, num_heads, half, BLOCK_H, BLOCK_E, INVERSE,
    )  # fmt: skip
    _rotate(
        keys, keys_out, token, cos_first, sin_first, cos_second, sin_second,
        stride_key, stride_key_head, num_kv_heads, half, BLOCK_KV, BLOCK_E, INVERSE,
    )  # fmt: skip


def rotate(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Both, contiguous ``[B, T, H, E]``; ``inverse`` gives the gradient of the inputs."""
    batch, length, num_heads, width = queries.shape
    queries, keys = _rows(queries), _rows(keys)
    out = [tensor.new_empty(batch, length, *tensor.shape[1:]) for tensor in (queries, keys)]
    cos, sin = cos.contiguous(), sin.contiguous()
    if batch * length:
        launch(
            _rotate_kernel,
            (batch * length,),
            (
                queries,
                keys,
                cos,
                sin,
                *out,
                cos.shape[0] * length,
                *queries.stride()[:2],
                *keys.stride()[:2],
            ),
            _constants(num_heads, keys.shape[1], width, inverse),
        )
    return out[0], out[1]


@functools.cache
def _constants(num_heads: int, num_kv_heads: int, width: int, inverse: bool) -> Constants:
    return Constants(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        half=width // 2,
        BLOCK_H=power_of_two(num_heads),
        BLOCK_KV=power_of_two(num_kv_heads),
        BLOCK_E=power_of_two(width // 2),
        INVERSE=inverse,
        # Or products would go into sums unrounded, and the last bits differ from plain PyTorch's.
        enable_fp_fusion=False,
    )


def _rows(heads: Tensor) -> Tensor:
    """``[B * T, H, E]`` with E contiguous, without a copy where strides allow it."""
    flat = heads.flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


class RotateHeads(torch.autograd.Function):
    """The kernel and its gradient, which is the rotation back."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return rotate(queries, keys, cos, sin, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_queries: Tensor, grad_keys: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return (*rotate(grad_queries, grad_keys, cos, sin, True), None, None)

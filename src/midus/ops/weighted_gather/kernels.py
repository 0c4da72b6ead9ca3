"""Weighted sum of table rows in Triton, and its gradients without expanded rows or atomics.

Paper, Eq. 5 (left) and Appendix "Deduplicated Gradient Accumulation", Algorithm 1. `README.md`
beside this file derives what each kernel does.

Shape letters: P bags (queries), K entries a bag, N rows of the table, R their width, M = P * K.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import ceil_div, power_of_two
from midus.ops.launch import Constants, launch

# Neighbouring rows of the table whose gradients one program accumulates in registers.
BUCKET = 64
# Programs that share the entries of a whole table.
_PROGRAMS = 264


@triton.jit(do_not_specialize=["num_bags"])
def _weighted_gather_fwd_kernel(
    values, slot_idx, weights, out, num_bags,
    num_slots: tl.constexpr, bag_size: tl.constexpr, width: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``out[p] = sum_k weights[p, k] * values[slot_idx[p, k]]``."""
    bag = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = bag < num_bags
    real = mask[:, None] & (r < width)[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_R], tl.float32)
    for k in range(bag_size):
        slot = tl.load(slot_idx + bag * bag_size + k, mask=mask, other=0).to(tl.int64)
        weight = tl.load(weights + bag * bag_size + k, mask=mask, other=0.0).to(tl.float32)
        # A slot that is not there reads NaN instead of someone else's memory.
        exists = (slot >= 0) & (slot < num_slots)
        rows = tl.load(
            values + slot[:, None] * width + r[None, :],
            mask=real & exists[:, None],
            other=float("nan"),
        )
        total += weight[:, None] * rows.to(tl.float32)
    tl.store(out + bag[:, None] * width + r[None, :], total.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_bags"])
def _weight_gradient_kernel(
    grad_out, values, slot_idx, grad_weights, num_bags,
    bag_size: tl.constexpr, width: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``grad_weights[p, k] = <grad_out[p], values[slot_idx[p, k]]>``."""
    bag = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    entry = bag[:, None] * bag_size + k[None, :]
    mask = (bag < num_bags)[:, None] & (k < bag_size)[None, :]
    slot = tl.load(slot_idx + entry, mask=mask, other=0).to(tl.int64)  # [P, K]
    total = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
    for start in range(0, width, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        grad = tl.load(
            grad_out + bag[:, None] * width + r[None, :],
            mask=(bag < num_bags)[:, None] & (r < width)[None, :],
            other=0.0,
        ).to(tl.float32)
        rows = tl.load(
            values + slot[:, :, None] * width + r[None, None, :],
            mask=mask[:, :, None] & (r < width)[None, None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(grad[:, None, :] * rows, axis=2)
    tl.store(grad_weights + entry, total.to(grad_weights.dtype.element_ty), mask=mask)


@triton.jit
def _add_rows(total, rows, weight, place, BUCKET: tl.constexpr):
    """``total[j] += sum of weight * row`` over the entries at place j, as a matrix product."""
    member = place[None, :] == tl.arange(0, BUCKET)[:, None]  # [bucket, entries]
    choice = tl.where(member, weight[None, :], 0.0)
    if rows.dtype == tl.bfloat16:
        total = tl.dot(choice.to(tl.bfloat16), rows, total)
    elif rows.dtype == tl.float16:
        # float16 would lose small weights; tf32 holds float16 rows exactly.
        total = tl.dot(choice, rows.to(tl.float32), total, input_precision="tf32")
    else:
        total = tl.dot(choice, rows, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_entries", "program_size"])
def _bucket_sum_kernel(
    grad_out, weights, slot_idx, buckets, order, partials, num_entries, program_size,
    bag_size: tl.constexpr, width: tl.constexpr, BUCKET: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``partials[program + bucket] = sum of weight * grad_out`` over a program's sorted entries.

    ``order`` lists the entries bucket by bucket; a program takes ``program_size`` of them and
    leaves one partial sum for every bucket it met. No other program writes there.
    """
    program = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = tl.arange(0, BUCKET)[:, None] * width + r[None, :]
    is_real = (tl.arange(0, BUCKET) >= 0)[:, None] & (r < width)[None, :]
    first = program * program_size
    last = tl.minimum(first + program_size, num_entries)
    bucket = tl.load(buckets + first).to(tl.int64)
    total = tl.zeros([BUCKET, BLOCK_R], tl.float32)
    for start in range(first, last, BLOCK_M):
        entry = start + tl.arange(0, BLOCK_M)
        mask = entry < last
        source = tl.load(order + entry, mask=mask, other=0)
        slot = tl.load(slot_idx + source, mask=mask, other=-1).to(tl.int64)
        weight = tl.load(weights + source, mask=mask, other=0.0).to(tl.float32)
        rows = tl.load(
            grad_out + (source // bag_size)[:, None] * width + r[None, :],
            mask=mask[:, None] & (r < width)[None, :],
            other=0.0,
        )  # [entries, R]
        newest = tl.load(buckets + tl.minimum(start + BLOCK_M, last) - 1).to(tl.int64)
        while bucket < newest:
            # Sorted: what follows belongs to later buckets, this one is complete.
            total = _add_rows(total, rows, weight, slot - bucket * BUCKET, BUCKET)
            where = partials + (program + bucket) * BUCKET * width
            tl.store(where + inside, total, mask=is_real)
            total = tl.zeros([BUCKET, BLOCK_R], tl.float32)
            bucket += 1
        total = _add_rows(total, rows, weight, slot - bucket * BUCKET, BUCKET)
    tl.store(partials + (program + bucket) * BUCKET * width + inside, total, mask=is_real)


@triton.jit(do_not_specialize=["num_entries", "program_size", "num_programs"])
def _partial_sum_kernel(
    buckets, partials, grad_values, num_entries, program_size, num_programs,
    num_slots: tl.constexpr, width: tl.constexpr, BUCKET: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``grad_values[slot] = sum of the partials`` of its bucket, in the order of the programs."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    bucket = tl.program_id(0).to(tl.int64) * BLOCK_S // BUCKET
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    program = tl.arange(0, BLOCK_P).to(tl.int64)
    mask = program < num_programs
    end = tl.minimum((program + 1) * program_size, num_entries)
    lowest = tl.load(buckets + program * program_size, mask=mask, other=0)
    highest = tl.load(buckets + end - 1, mask=mask, other=0)
    met = mask & (lowest.to(tl.int64) <= bucket) & (bucket <= highest.to(tl.int64))
    first = tl.min(tl.where(met, program, num_programs))
    last = tl.max(tl.where(met, program + 1, 0))
    inside = (slot % BUCKET)[:, None] * width + r[None, :]
    is_real = (slot < num_slots)[:, None] & (r < width)[None, :]
    total = tl.zeros([BLOCK_S, BLOCK_R], tl.float32)
    for p in range(first, last):
        where = partials + (p + bucket) * BUCKET * width
        total += tl.load(where + inside, mask=is_real, other=0.0)
    where = slot[:, None] * width + r[None, :]
    tl.store(grad_values + where, total.to(grad_values.dtype.element_ty), mask=is_real)


def weighted_gather_forward(values: Tensor, slot_idx: Tensor, weights: Tensor) -> Tensor:
    """Sums ``[..., R]`` in the type of ``values``, for ``[..., K]`` slots and weights."""
    bags, bag_size = slot_idx.shape[:-1], slot_idx.shape[-1]
    num_bags, width = bags.numel(), values.shape[1]
    out = torch.empty((*bags, width), dtype=values.dtype, device=values.device)
    if not out.numel():
        return out
    block_r = min(power_of_two(width, 16), 256)
    block_p = max(1, 2048 // block_r)
    launch(
        _weighted_gather_fwd_kernel,
        (ceil_div(num_bags, block_p), ceil_div(width, block_r)),
        (values.contiguous(), slot_idx.contiguous(), weights.contiguous(), out, num_bags),
        {
            "num_slots": values.shape[0],
            "bag_size": bag_size,
            "width": width,
            "BLOCK_P": block_p,
            "BLOCK_R": block_r,
        },
    )
    return out


def weight_gradient(grad_out: Tensor, values: Tensor, slot_idx: Tensor, weights: Tensor) -> Tensor:
    """Gradient of the weights ``[..., K]``, in their type."""
    num_bags, bag_size = slot_idx.shape[:-1].numel(), slot_idx.shape[-1]
    width = values.shape[1]
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    if not grad_weights.numel():
        return grad_weights
    block_k = min(power_of_two(bag_size), 16)
    block_p = 16 // block_k
    launch(
        _weight_gradient_kernel,
        (ceil_div(num_bags, block_p), ceil_div(bag_size, block_k)),
        (grad_out.contiguous(), values.contiguous(), slot_idx.contiguous(), grad_weights, num_bags),
        {
            "bag_size": bag_size,
            "width": width,
            "BLOCK_P": block_p,
            "BLOCK_K": block_k,
            "BLOCK_R": min(power_of_two(width, 16), 256),
        },
    )
    return grad_weights


def weighted_gather_backward(
    grad_out: Tensor, values: Tensor, slot_idx: Tensor, weights: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of the table and of the weights, in their types; empty where not needed."""
    grad_out = grad_out.contiguous()
    slot_idx = slot_idx.clamp(0, values.shape[0] - 1)  # those outside have made the output NaN
    grad_values, grad_weights = values.new_empty(0), weights.new_empty(0)
    if needs[0]:
        grad_values = table_gradient(grad_out, slot_idx, weights, values.shape[0], values.dtype)
    if needs[1]:
        grad_weights = weight_gradient(grad_out, values, slot_idx, weights)
    return grad_values, grad_weights


def sort_entries(slot_idx: Tensor, num_slots: int) -> tuple[Tensor, ...]:
    """The entries bucket by bucket: the sorted bucket numbers, and where each entry comes from."""
    num_buckets = ceil_div(num_slots, BUCKET)
    # The fewer bits, the faster they sort.
    dtype = torch.int32
    if num_buckets <= 1 << 15:
        dtype = torch.uint8 if num_buckets <= 1 << 8 else torch.int16
    buckets, order = (slot_idx.flatten() // BUCKET).to(dtype).sort(stable=True)
    return buckets, order


def table_gradient(
    grad_out: Tensor,
    slot_idx: Tensor,
    weights: Tensor,
    num_slots: int,
    dtype: torch.dtype,
    entries: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """Gradient of the table ``[N, R]``: entries sorted by bucket of slots, then summed.

    Every entry has a fixed place in a fixed order of sums, so the result is reproducible to the
    bit, and a slot that everybody chose costs little more than any other.

    Args:
        grad_out: ``[..., R]``.
        slot_idx: ``[..., K]``.
        weights: ``[..., K]``.
        num_slots: Rows of the table.
        dtype: Type of the gradient.
        entries: What ``sort_entries`` makes of ``slot_idx``, where the caller has it already.
    """
    width = grad_out.shape[-1]
    num_entries = slot_idx.numel()
    grad_values = torch.empty((num_slots, width), dtype=dtype, device=grad_out.device)
    if not num_entries or not grad_values.numel():
        return grad_values.zero_()
    buckets, order = entries or sort_entries(slot_idx, num_slots)
    block_r = min(power_of_two(width, 16), 128)
    tiles = ceil_div(width, block_r)
    program_size = max(ceil_div(num_entries, max(_PROGRAMS // tiles, 1)), 64)
    num_programs = ceil_div(num_entries, program_size)
    num_partials = num_programs + ceil_div(num_slots, BUCKET) - 1
    partials = torch.empty(
        (num_partials, BUCKET, width), dtype=torch.float32, device=grad_out.device
    )
    launch(
        _bucket_sum_kernel,
        (num_programs, tiles),
        (
            grad_out.contiguous(),
            weights.contiguous(),
            slot_idx.contiguous(),
            buckets,
            order,
            partials,
            num_entries,
            program_size,
        ),
        _bucket_constants(slot_idx.shape[-1], width, grad_out.dtype),
    )
    block_s = 16 if num_slots <= 1 << 16 else BUCKET
    launch(
        _partial_sum_kernel,
        (ceil_div(num_slots, block_s), tiles),
        (buckets, partials, grad_values, num_entries, program_size, num_programs),
        _partial_constants(num_slots, width, power_of_two(num_programs), block_s),
    )
    return grad_values


@functools.cache
def _bucket_constants(bag_size: int, width: int, dtype: torch.dtype) -> Constants:
    return Constants(
        bag_size=bag_size,
        width=width,
        BUCKET=BUCKET,
        BLOCK_M=128 if dtype != torch.float32 else 32,
        BLOCK_R=min(power_of_two(width, 16), 128),
        num_stages=2,
    )


@functools.cache
def _partial_constants(num_slots: int, width: int, block_p: int, block_s: int) -> Constants:
    return Constants(
        num_slots=num_slots,
        width=width,
        BUCKET=BUCKET,
        BLOCK_P=block_p,
        BLOCK_S=block_s,
        BLOCK_R=min(power_of_two(width, 16), 128),
    )

"""Inference: memory, and the limits of decoding (bytes) and of prefill (operations)."""

from dataclasses import dataclass
from typing import Any

from midus.efficiency.cost_sizes import Block, Stack
from midus.efficiency.cost_time import bound_by, total_seconds
from midus.efficiency.cost_work import Work, forward_work
from midus.efficiency.gpus import Gpu, Shares

_WIDTH = 2  # bfloat16
PREFILL = 2048


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One GPU that holds the whole model in bfloat16."""

    weights: float
    value_caches: float
    kv_cache: float
    workspace: float
    memory_gb: float
    """What the GPU has."""
    decode_bytes: float
    """Read for one token of every sequence."""
    decode_tokens_s: float
    decode_bound: str
    prefill_ms: float
    prefill_operations: float
    """Of a prompt of ``PREFILL`` tokens."""
    prefill_bound: str

    @property
    def total(self) -> float:
        return self.weights + self.value_caches + self.kv_cache + self.workspace

    @property
    def fits(self) -> bool:
        return self.total <= self.memory_gb * 1e9

    def to_dict(self) -> dict[str, Any]:
        names = ("weights", "value_caches", "kv_cache", "workspace", "total", "decode_bytes")
        labels = {"decode_bytes": "decode_gb"}
        sizes = {labels.get(name, f"{name}_gb"): getattr(self, name) / 1e9 for name in names}
        return {
            **sizes,
            "fits": self.fits,
            "decode_tokens_s": self.decode_tokens_s,
            "decode_bound": self.decode_bound,
            "prefill_ms": self.prefill_ms,
            "prefill_tflop": self.prefill_operations / 1e12,
            "prefill_bound": self.prefill_bound,
        }


def predict_serving(stack: Stack, gpu: Gpu, shares: Shares, context: int, batch: int) -> Serving:
    """What serving takes.

    Args:
        stack: The model.
        gpu: The GPU.
        shares: How much of its data sheet it gives.
        context: Tokens in the cache of each sequence.
        batch: Sequences at a time.
    """
    kv_cache = 2 * stack.base.kv_width * stack.depth * context * batch * _WIDTH
    read = decode_bytes(stack, batch) + kv_cache
    operations = 2.0 * batch * decode_bytes(stack, 1) / _WIDTH
    times = {
        "bytes": read / (gpu.bandwidth_gbs * 1e9 * shares.decode),
        "products": operations / (gpu.bf16_tflops * 1e12 * shares.products),
        "latency": decode_latency(stack, shares),
    }
    step = max(times["bytes"], times["products"]) + times["latency"]
    prefill = prefill_work(stack, PREFILL)
    return Serving(
        weights=stack.params_total * _WIDTH,
        value_caches=_value_caches(stack),
        kv_cache=kv_cache,
        workspace=prefill_workspace(stack, context),
        memory_gb=gpu.memory_gb,
        decode_bytes=read,
        decode_tokens_s=batch / step,
        decode_bound=max(times, key=lambda name: times[name]),
        prefill_ms=total_seconds(prefill, gpu, shares, shares.launch_us) * 1e3,
        prefill_operations=prefill.operations,
        prefill_bound=bound_by(prefill, gpu, shares, shares.launch_us),
    )


def decode_latency(stack: Stack, shares: Shares) -> float:
    """Seconds of a compiled step that do not depend on bytes: kernels that wait for each other."""
    memory = stack.inserted.memory if stack.inserted else None
    num_memory = len(stack.positions) if memory else 0
    memory_us = shares.memory_us[memory.kind] if memory else 0.0
    return 1e-6 * ((stack.depth - num_memory) * shares.block_us + num_memory * memory_us)


def prefill_work(stack: Stack, length: int) -> Work:
    """A prompt into an empty cache, and the logits of its last token.

    Blocks of the base are not fused there, memory blocks are.
    """
    work = Work(matmul=2.0 * stack.head_params, launches=10)
    for index in range(stack.depth):
        block = stack.block(index)
        is_fused = block.can_be_fused and block.memory is not None
        work += forward_work(block, length, length / 2, is_fused)
    return work


def prefill_workspace(stack: Stack, tokens: int) -> float:
    """The widest moment of a block: the stream, its norm, and the three of the feed-forward.

    ``tokens`` are one sequence's: servers fill the cache one prompt at a time.
    """
    return tokens * _WIDTH * (2 * stack.hidden + 3 * stack.base.intermediate)


def decode_bytes(stack: Stack, batch: int) -> float:
    """Weights that one step reads, and the rows of tables that its sequences pick."""
    # The head is read whole, the embedding by rows; a tied one is the head.
    numbers = float(stack.head_params + stack.hidden * (1 + batch))
    for index in range(stack.depth):
        numbers += _block_numbers(stack.block(index), batch)
    return numbers * _WIDTH


def _block_numbers(block: Block, batch: int) -> float:
    memory = block.memory
    if memory is None:
        return block.params
    read = float(block.params - memory.value_params)
    if memory.kind == "hml":
        rows, width = memory.num_heads * memory.num_slots, memory.head_width
    elif memory.kind == "ultramem":
        read += memory.hidden**2  # its projection is no table
        rows, width = memory.num_slots, memory.hidden // 4
    else:
        rows, width = memory.num_slots, memory.hidden
    return read + min(batch * memory.picked, rows) * width


def _value_caches(stack: Stack) -> float:
    memory = stack.inserted.memory if stack.inserted else None
    if memory is None or memory.kind != "hml" or memory.values != "hive":
        return 0.0
    return len(stack.positions) * memory.num_slots * memory.hidden * _WIDTH

"""What PyTorch keeps of the forward pass for the backward one, in bytes.

Counted op by op from what each saves; `tests/efficiency/test_cost_model.py` compares it with the
tensors that autograd really saves. Blocks under the lowest one that trains keep nothing. On a GPU
blocks of Llama's kind run fused (`models/fused.py`, `models/fused_base.py`) and keep less.
"""

from dataclasses import dataclass
from typing import Literal

from midus.efficiency.cost_sizes import Block, Memory, Stack, is_fused_norm

Precision = Literal["bf16", "mixed", "float32"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "mixed", "float32")


@dataclass(frozen=True, kw_only=True)
class Types:
    """Bytes of a number, by what it is."""

    trained: int
    """A weight that trains, its gradient, and each of the optimizer's two states."""
    frozen: int
    computed: int
    """Results of matrix products."""
    stream: int
    """The residual stream."""
    casts: bool
    """Whether trained weights and what they read are cast for each product (autocast)."""


def types_of(precision: Precision, trains_all: bool) -> Types:
    """The types of a run: pure bfloat16 as the paper's, mixed as `midus train` has it."""
    if precision == "mixed":
        # An embedding that trains is in float32, and so is everything that is added to it.
        stream = 4 if trains_all else 2
        return Types(trained=4, frozen=2, computed=2, stream=stream, casts=True)
    width = 2 if precision == "bf16" else 4
    return Types(trained=width, frozen=width, computed=width, stream=width, casts=False)


@dataclass(frozen=True, kw_only=True)
class Fusing:
    """Which blocks run in few, large steps."""

    base: bool = True
    """Blocks of the base and copies of them: `fuse_blocks`, which `midus train` calls."""
    memory: bool = True
    """Memory blocks, which do so by themselves on a GPU."""

    def applies(self, block: Block) -> bool:
        """Whether a block takes the fused path."""
        return block.can_be_fused and (self.memory if block.memory else self.base)


FUSED = Fusing()
PLAIN = Fusing(base=False, memory=False)


def saved_bytes(
    stack: Stack, batch: int, length: int, precision: Precision, fusing: Fusing = FUSED
) -> int:
    """Everything kept between the two passes of one micro batch, the loss's part included.

    Args:
        stack: The model.
        batch: Sequences.
        length: Tokens of each.
        precision: Of the run.
        fusing: Which blocks are fused.
    """
    types = types_of(precision, stack.trains_all)
    blocks = sum(
        _block_bytes(stack, index, batch * length, types, fusing)
        for index in range(stack.lowest, stack.depth)
    )
    return blocks + _ends_bytes(stack, batch, length, types)


def checkpointed_bytes(
    stack: Stack, batch: int, length: int, precision: Precision, fusing: Fusing = FUSED
) -> int:
    """The same with gradient checkpointing: the blocks' inputs, and all of the largest block."""
    types = types_of(precision, stack.trains_all)
    visited = range(stack.lowest, stack.depth)
    inputs = len(visited) * batch * length * stack.hidden * types.stream
    largest = max(_block_bytes(stack, index, batch * length, types, fusing) for index in visited)
    return inputs + largest + _ends_bytes(stack, batch, length, types)


def _ends_bytes(stack: Stack, batch: int, length: int, types: Types) -> int:
    """Embedding, rotary tables, the last norm, and the gradients the loss makes at once."""
    tokens, hidden = batch * length, stack.hidden
    rotary = 2 * length * (stack.base.attended // stack.base.num_heads) * types.stream
    last_norm = tokens * (4 * hidden + 4 + (types.stream * hidden if stack.trains_all else 0))
    last_hidden = types.stream if not types.casts or not stack.trains_all else 4
    loss = tokens * hidden * last_hidden
    if stack.trains_all:
        loss += stack.head_params * types.trained + 8 * tokens  # and the embedding's token ids
    return rotary + last_norm + loss


def _block_bytes(stack: Stack, index: int, tokens: int, types: Types, fusing: Fusing) -> int:
    block, trains = stack.block(index), stack.trains(index)
    needs_input = stack.trains_all or index > stack.lowest
    is_fused = fusing.applies(block)
    a_token = _token_bytes(block, trains, needs_input, is_fused, types)
    fixed = block.linear * 2 if types.casts and trains else 0
    if block.memory:
        fixed += _memory_fixed_bytes(block.memory, types)
    return tokens * a_token + fixed


def _token_bytes(
    block: Block, trains: bool, needs_input: bool, is_fused: bool, types: Types
) -> int:
    """One token's share; ``needs_input`` is False where nothing before the block trains."""
    width = types.computed
    saved = 0
    for norm in block.norms:
        if is_fused and is_fused_norm(block, norm):
            saved += types.stream * norm.covered + 4 * norm.vectors  # its input and its scale
            continue
        if needs_input or not norm.reads_input:
            saved += 4 * norm.covered + 4 * norm.vectors  # the input in float32 and its scale
        if trains:
            # The normed vector, for the norm's own weight.
            saved += (4 if norm.is_wide else types.stream) * norm.covered
    saved += width * (2 * block.attended + 2 * block.kv_width)  # queries, keys, values, output
    saved += 4 * block.num_heads  # the softmax's sums
    # Plain norms are in the stream's type or wider, and autocast makes a copy for each reader.
    has_copies = types.casts and not is_fused
    if trains:
        # One normed input for three projections, or four.
        reads = 4 if block.memory and block.memory.bypasses_stream else 3
        saved += width * block.hidden * (reads if has_copies else 1)
    if block.memory:
        return saved + _memory_token_bytes(block.memory, types)
    # Gate and up; the plain path also keeps the gate's activation.
    saved += width * (2 if is_fused else 3) * block.intermediate
    if trains:
        saved += width * (block.hidden * (2 if has_copies else 1) + block.intermediate)
    return saved


def _memory_token_bytes(memory: Memory, types: Types) -> int:
    width, picked = types.computed, memory.picked
    saved = width * memory.hidden if memory.has_output_proj else 0
    if memory.has_query_proj and (memory.has_residual or memory.has_attention_proj):
        saved += width * memory.hidden  # what the query projection reads
    if memory.bypass == "joined":
        saved += width * memory.hidden  # the sum of both
    elif memory.bypasses_attention and memory.has_attention_proj and memory.has_residual:
        saved += width * memory.attended  # what the bypass reads; else others keep it anyway
    has_own_queries = memory.has_query_proj or memory.has_query_norm
    queries = memory.attended if has_own_queries else 0  # else they are attention's output
    if memory.kind == "hml" and memory.values == "hive":
        return saved + width * queries + 8 * picked  # slots in 32 bits and weights
    if memory.kind in ("hml", "pkm"):
        slots = 16 if memory.values == "independent" else 8
        return saved + width * queries + (slots + 4) * picked
    if memory.kind == "linear":
        chosen = 4 * memory.top_k * memory.attended
        return saved + 4 * memory.attended + chosen + (16 + 4) * picked
    return saved + _ultramem_token_bytes(memory, width)


def _ultramem_token_bytes(memory: Memory, width: int) -> int:
    rank, cores, expansion = 2, 2, 4
    heads, picked = memory.num_heads, memory.picked
    norms = 4 * 2 * memory.attended + 2 * 2 * 4 * heads
    sides = 2 * 4 * heads * 2 * memory.num_subkeys * rank
    pairs = 4 * picked * memory.top_k * cores
    found = 3 * 8 * picked + 2 * 4 * picked * rank + 4 * picked * rank * cores
    read = (8 + 4) * picked * cores + width * expansion * picked
    return norms + sides + pairs + found + read + width * memory.hidden


def _memory_fixed_bytes(memory: Memory, types: Types) -> int:
    """What does not grow with the tokens: copies of tables and keys in another type."""
    if memory.kind == "ultramem":
        return 2 * 4 * memory.key_params
    is_cast = types.casts and memory.kind == "hml" and memory.values == "hive"
    return 2 * memory.value_params if is_cast else 0

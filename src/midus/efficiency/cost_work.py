"""What one pass over a block computes and moves: operations, bytes, launches.

Products are counted exactly from the sizes. Elementwise bytes are counted op by op, for fused and
for plain blocks; memory layers as their kernels run, or their reference where there are none.
Shape letters: D hidden, A all heads' width, K top_k, P all heads' picked slots, n sub-keys.
"""

from dataclasses import dataclass, fields, replace

from midus.efficiency.cost_sizes import Block, Memory, is_fused_norm

# UltraMem's grid and physical table, as `memory/ultramem.py` has them.
_SIDE, _RANK, _EXPANSION = 2, 2, 4

# Sort of the entries, sums on a second stream with its events, and four parameters' sums.
_TABLE_LAUNCHES = 20

# Attention's backward pass: four products where the forward pass has two. That its kernel makes
# one of the forward pass's again is no operation of the model.
_ATTENTION_BACKWARD = 2


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations and bytes of a pass; launches do not grow with the tokens."""

    matmul: float = 0.0
    """Operations of products with weights."""
    attention: float = 0.0
    """Operations of attention."""
    float32: float = 0.0
    """Operations of products in float32."""
    moved: float = 0.0
    """Bytes read and written between products."""
    linear_scores: float = 0.0
    """Bytes of the scores that a linear memory searches, once."""
    ultramem_scores: float = 0.0
    """Bytes of the scores that an UltraMem searches, once."""
    launches: float = 0.0
    """Kernels the host starts."""

    @property
    def operations(self) -> float:
        return self.matmul + self.attention + self.float32

    def __add__(self, other: "Work") -> "Work":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Work(**sums)

    def times(self, factor: float) -> "Work":
        """The same so often."""
        return Work(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


def forward_work(
    block: Block, tokens: int, length: float, is_fused: bool = False, width: int = 2
) -> Work:
    """One forward pass over a block.

    Args:
        block: Its sizes.
        tokens: Of the whole batch.
        length: Tokens each of them attends to, on average.
        is_fused: Whether norms, rotation and gate run as one kernel each.
        width: Bytes of a number.
    """
    memory = _memory_forward(block.memory, width) if block.memory else Work()
    around = Work(
        matmul=2.0 * block.linear,
        attention=4.0 * length * block.attended,
        moved=_moved_forward(block, is_fused, width),
    )
    launches = _launches_forward(block, is_fused) + memory.launches
    return replace((around + memory).times(tokens), launches=launches)


def backward_work(
    block: Block, tokens: int, length: float, is_fused: bool, trains: bool, width: int = 2
) -> Work:
    """One backward pass: gradients of the input always, of the weights where they train."""
    memory = _memory_backward(block.memory, width) if block.memory else Work()
    around = Work(
        matmul=2.0 * block.linear * (2 if trains else 1),
        attention=4.0 * length * block.attended * _ATTENTION_BACKWARD,
        moved=_moved_backward(block, is_fused, trains, width),
    )
    launches = _launches_backward(block, is_fused, trains) + memory.launches
    return replace((around + memory).times(tokens), launches=launches)


def _launches_forward(block: Block, is_fused: bool) -> int:
    # A plain norm is 6 kernels and the rotation of queries and keys 10; fused, each is one.
    norms = sum(1 if is_fused and is_fused_norm(block, norm) else 6 for norm in block.norms)
    rotation = 1 if is_fused else 10
    attention, residual = 1, 1 + block.num_bypasses
    # Three products, the gate (one kernel or two) and the second residual.
    feed_forward = 4 + (1 if is_fused else 2) if block.intermediate else 0
    return norms + rotation + _products(block) + attention + residual + feed_forward


def _launches_backward(block: Block, is_fused: bool, trains: bool) -> int:
    norms = sum(2 if is_fused and is_fused_norm(block, norm) else 12 for norm in block.norms)
    rotation = 1 if is_fused else 15
    attention = 3
    products = _products(block) + (3 if block.intermediate else 0)
    # Gradients of what several products read are added up, two of queries, keys and values.
    sums = 3 + (2 if block.intermediate else 0) + block.num_bypasses
    gate = (1 if is_fused else 4) if block.intermediate else 0
    # A second product for each weight, and the sum with what is there.
    weights = 2 * products + len(block.norms) if trains else 0
    return norms + rotation + attention + products + sums + gate + weights


def _products(block: Block) -> int:
    return 4 if block.intermediate else 3  # a memory block has no o_proj


def _moved_forward(block: Block, is_fused: bool, width: int) -> float:
    norms = sum(
        norm.covered * (2 * width if is_fused and is_fused_norm(block, norm) else 28 + 4 * width)
        for norm in block.norms
    )
    rotation = (2 if is_fused else 10) * width * (block.attended + block.kv_width)
    num_residuals = 1 + (1 if block.intermediate else block.num_bypasses)
    residuals = 3 * width * block.hidden * num_residuals
    return norms + rotation + residuals + (3 if is_fused else 5) * width * block.intermediate


def _moved_backward(block: Block, is_fused: bool, trains: bool, width: int) -> float:
    plain = 68 + 7 * width + (5 * width if trains else 0)
    norms = sum(
        norm.covered * (4 * width if is_fused and is_fused_norm(block, norm) else plain)
        for norm in block.norms
    )
    rotation = (2 if is_fused else 15) * width * (block.attended + block.kv_width)
    # The gradients of inputs that several products share are added up.
    shared = 2 * 3 * width * block.hidden + (3 * width * block.hidden if block.intermediate else 0)
    if block.memory is not None:
        # What the bypass reads, another product does too: the memory's, or queries, keys, values.
        shared += 3 * width * block.memory.attended * block.memory.bypasses_attention
        shared += 3 * width * block.hidden * block.memory.bypasses_stream
    return norms + rotation + shared + (5 if is_fused else 9) * width * block.intermediate


def _memory_forward(memory: Memory, width: int) -> Work:
    """One token through a memory layer; matrices of projections are counted with the block's."""
    heads, n, attended = memory.num_heads, memory.num_subkeys, memory.attended
    read_and_write = width * (attended + memory.hidden)
    if memory.kind == "hml":
        project = memory.latent_dim * memory.hidden if memory.values == "hive" else 0
        gathered = memory.latent_dim if memory.values == "hive" else memory.head_width
        return Work(
            # Rows and columns each meet n keys of half a head's query.
            matmul=2.0 * (n * attended + memory.picked * gathered + project),
            moved=read_and_write,
            launches=(1 if memory.values == "hive" else 4) + memory.num_projections,
        )
    gathered = memory.picked * memory.hidden
    if memory.kind == "pkm":
        return Work(
            matmul=2.0 * (n * attended + gathered),
            moved=read_and_write + width * gathered,
            launches=4 + memory.num_projections,
        )
    if memory.kind == "linear":
        chosen = memory.top_k * attended
        return Work(
            matmul=2.0 * gathered,
            float32=2.0 * (memory.num_slots * attended + chosen),
            moved=read_and_write + width * gathered + (2 * width + 20) * chosen,
            linear_scores=4.0 * heads * memory.num_slots,
            launches=14 + memory.num_projections,
        )
    rows = heads * _SIDE * n * _RANK  # scores of one side
    picked = memory.picked * memory.hidden // _EXPANSION
    return Work(
        matmul=2.0 * (memory.hidden**2 + picked * (1 + _EXPANSION)),
        float32=2.0 * _SIDE * n * _RANK * attended,
        moved=read_and_write + 2 * 4 * rows * 3 + 5 * width * picked + 36 * attended,
        ultramem_scores=2 * 4 * rows,
        launches=60,
    )


def _memory_backward(memory: Memory, width: int) -> Work:
    """The same for its gradients, all of which are needed: the layer trains."""
    forward = _memory_forward(memory, width)
    return Work(
        matmul=2 * forward.matmul,
        # A search has no gradient, only the scores of what it found.
        float32=0.0 if memory.kind == "linear" else 2 * forward.float32,
        moved=2 * forward.moved,
        # A product's gradient is two and two sums of them; the table's is sorted, then summed.
        launches=forward.launches + 3 * memory.num_projections + _TABLE_LAUNCHES,
    )

"""What one pass over a block computes and moves: operations, bytes, launches.

Products are counted exactly from the sizes. Elementwise bytes are counted op by op as PyTorch runs
the blocks eagerly; memory layers as their kernels run, or their reference where there are none.
Shape letters: D hidden, A all heads' width, K top_k, P all heads' picked slots, n sub-keys.
"""

from dataclasses import dataclass

from midus.efficiency.cost_sizes import Block, Memory

# UltraMem's grid and physical table, as `memory/ultramem.py` has them.
_SIDE, _RANK, _EXPANSION = 2, 2, 4

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
    launches: float = 0.0
    """Kernels Python starts."""

    @property
    def operations(self) -> float:
        return self.matmul + self.attention + self.float32

    def __add__(self, other: "Work") -> "Work":
        return Work(
            matmul=self.matmul + other.matmul,
            attention=self.attention + other.attention,
            float32=self.float32 + other.float32,
            moved=self.moved + other.moved,
            launches=self.launches + other.launches,
        )

    def times(self, factor: float) -> "Work":
        """The same so often."""
        return Work(
            matmul=self.matmul * factor,
            attention=self.attention * factor,
            float32=self.float32 * factor,
            moved=self.moved * factor,
            launches=self.launches * factor,
        )


def forward_work(block: Block, tokens: int, length: float, width: int = 2) -> Work:
    """One forward pass over a block.

    Args:
        block: Its sizes.
        tokens: Of the whole batch.
        length: Tokens each of them attends to, on average.
        width: Bytes of a number.
    """
    memory = _memory_forward(block.memory, width) if block.memory else Work()
    a_token = Work(
        matmul=2.0 * block.linear + memory.matmul,
        attention=4.0 * length * block.attended,
        float32=memory.float32,
        moved=_moved_forward(block, width) + memory.moved,
    ).times(tokens)
    return a_token + Work(launches=_launches(block) + memory.launches)


def backward_work(block: Block, tokens: int, length: float, trains: bool, width: int = 2) -> Work:
    """One backward pass: gradients of the input always, of the weights where they train."""
    memory = _memory_backward(block.memory, width) if block.memory else Work()
    a_token = Work(
        matmul=2.0 * block.linear * (2 if trains else 1) + memory.matmul,
        attention=4.0 * length * block.attended * _ATTENTION_BACKWARD,
        float32=memory.float32,
        moved=_moved_backward(block, trains, width) + memory.moved,
    ).times(tokens)
    return a_token + Work(launches=_launches(block) + memory.launches)


def _launches(block: Block) -> int:
    # A plain norm is 6 kernels and the rotation of queries and keys 10; fused, each is one.
    norms = sum(1 if block.is_fused and norm.reads_input else 6 for norm in block.norms)
    rotation = 1 if block.is_fused else 10
    projections_and_attention = 4
    residual = 1
    feed_forward = 5 + 1 + 1 if block.intermediate else 0  # with o_proj and its residual
    return norms + rotation + projections_and_attention + residual + feed_forward


def _moved_forward(block: Block, width: int) -> float:
    norms = sum(
        norm.covered * (2 * width if block.is_fused and norm.reads_input else 28 + 4 * width)
        for norm in block.norms
    )
    rotation = (2 if block.is_fused else 10) * width * (block.attended + block.kv_width)
    residuals = 3 * width * block.hidden * (2 if block.intermediate else 1)
    return norms + rotation + residuals + 5 * width * block.intermediate


def _moved_backward(block: Block, trains: bool, width: int) -> float:
    plain = 68 + 7 * width + (5 * width if trains else 0)
    norms = sum(
        norm.covered * (8 * width if block.is_fused and norm.reads_input else plain)
        for norm in block.norms
    )
    rotation = (2 if block.is_fused else 15) * width * (block.attended + block.kv_width)
    # The gradients of inputs that several products share are added up.
    shared = 2 * 3 * width * block.hidden + (3 * width * block.hidden if block.intermediate else 0)
    return norms + rotation + shared + 9 * width * block.intermediate


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
            launches=1 if memory.values == "hive" else 4,
        )
    gathered = memory.picked * memory.hidden
    if memory.kind == "pkm":
        return Work(
            matmul=2.0 * (n * attended + gathered),
            moved=read_and_write + width * gathered,
            launches=4,
        )
    if memory.kind == "linear":
        scores = heads * memory.num_slots
        chosen = memory.top_k * attended
        return Work(
            matmul=2.0 * gathered,
            float32=2.0 * (memory.num_slots * attended + chosen),
            # Scores are written, and read to find the best.
            moved=read_and_write + width * gathered + 8 * scores + (2 * width + 20) * chosen,
            launches=14,
        )
    rows = heads * _SIDE * n * _RANK  # scores of one side
    picked = memory.picked * memory.hidden // _EXPANSION
    return Work(
        matmul=2.0 * (memory.hidden**2 + picked * (1 + _EXPANSION)),
        float32=2.0 * _SIDE * n * _RANK * attended,
        moved=read_and_write + 2 * 4 * rows * 3 + 5 * width * picked + 36 * attended,
        launches=60,
    )


def _memory_backward(memory: Memory, width: int) -> Work:
    """The same for its gradients, all of which are needed: the layer trains."""
    forward = _memory_forward(memory, width)
    return Work(
        matmul=2 * forward.matmul,
        # Linear's search has no gradient, only the scores of what it found.
        float32=0.0 if memory.kind == "linear" else 2 * forward.float32,
        moved=2 * forward.moved
        - (16 * memory.num_heads * memory.num_slots if memory.kind == "linear" else 0),
        launches=forward.launches,
    )

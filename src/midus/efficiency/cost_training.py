"""One training iteration: the memory it peaks at and the work it does, on one GPU's share.

As `midus bench` and `midus train` run it: micro batches one after another, gradients added up, the
loss in chunks of tokens, fused AdamW. The paper's figures are in pure bfloat16.
"""

from dataclasses import dataclass
from typing import Any

from midus.efficiency.cost_activations import (
    PRECISIONS,
    Fusing,
    Precision,
    checkpointed_bytes,
    saved_bytes,
    types_of,
)
from midus.efficiency.cost_sizes import Stack
from midus.efficiency.cost_work import Work, backward_work, forward_work
from midus.efficiency.gpus import NODE_SIZE
from midus.errors import MidusError

_LOSS_CHUNK = 1024
# Bytes moved for a logit in bfloat16, but for the products: cross-entropy reads it twice and
# writes its gradient over it, and the products' own writes and reads.
_LOGIT_BYTES_MOVED = 12
_LAUNCHES_A_CHUNK = 8
# Embedding, rotary tables, the last norm and their gradients.
_LAUNCHES_OUTSIDE = 40
# cuBLAS keeps 32 MiB a handle and stream on Hopper; a training process has three.
LIBRARY_BYTES = 3 * 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Run:
    """How one iteration is trained."""

    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 16
    gpus: int = 1
    precision: Precision = "bf16"
    checkpointing: bool = False
    fused_blocks: bool = True
    """Blocks of the base in few, large steps, as `midus train` has them on a GPU."""
    cuda_graphs: bool = True
    """Steps replayed as graphs, as `midus train` does on one GPU without checkpointing."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("sequence", "micro_batch", "accumulation", "gpus"):
            value = getattr(self, name)
            if not 1 <= value <= 10**7:
                raise MidusError(f"{name}={value} must be a whole number from 1 to 10,000,000")
        if self.gpus > NODE_SIZE and self.gpus % NODE_SIZE:
            raise MidusError(
                f"gpus={self.gpus} is no number of whole nodes; beyond {NODE_SIZE} give a "
                f"multiple of {NODE_SIZE}, such as {NODE_SIZE * (self.gpus // NODE_SIZE + 1)}"
            )
        if self.precision not in PRECISIONS:
            raise MidusError(
                f"precision={self.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}"
            )

    def launches_eagerly(self, stack: Stack) -> bool:
        """Whether the host starts each kernel of a micro batch, and can be what bounds it."""
        is_graphed = self.cuda_graphs and self.gpus == 1 and not self.checkpointing
        return not (is_graphed and stack.base.can_be_fused)

    @property
    def fusing(self) -> Fusing:
        return Fusing(base=self.fused_blocks)

    @property
    def tokens(self) -> int:
        """Of one micro batch on one GPU."""
        return self.micro_batch * self.sequence

    @property
    def tokens_per_iteration(self) -> int:
        """Of all GPUs."""
        return self.tokens * self.accumulation * self.gpus


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes on one GPU. Loss, backward pass and optimizer are not there at the same time."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    """Logits and gradients of one chunk."""
    workspace: float
    """Gradients between the ops of one block."""
    libraries: float = LIBRARY_BYTES
    """Workspaces of cuBLAS."""
    gathered: float = 0.0
    """Weights that are whole for the moment, where they are sharded."""
    keeps_gradients: bool = True
    """Whether gradients of earlier micro batches are there while the next one runs."""

    @property
    def phases(self) -> dict[str, float]:
        """The bytes of each moment that can be the peak."""
        kept = self.weights + self.optimizer + self.libraries + self.gathered
        passing = kept + self.activations + (self.gradients if self.keeps_gradients else 0.0)
        return {
            "loss": passing + self.loss,
            "backward": passing + self.workspace,
            "step": kept + self.gradients,
        }

    @property
    def total(self) -> float:
        return max(self.phases.values())

    @property
    def peak(self) -> str:
        """When the total is reached."""
        return max(self.phases, key=lambda name: self.phases[name])

    def to_dict(self) -> dict[str, Any]:
        names = ("weights", "gradients", "optimizer", "activations", "loss", "workspace")
        others = ("libraries", "gathered", "total")
        sizes = {f"{name}_gb": getattr(self, name) / 1e9 for name in (*names, *others)}
        return {**sizes, "peak": self.peak}


def training_memory(stack: Stack, run: Run) -> TrainingMemory:
    """The memory of an iteration on one GPU that holds the whole model."""
    types = types_of(run.precision, stack.trains_all)
    trained, frozen = stack.params_trainable, stack.params_total - stack.params_trainable
    count = checkpointed_bytes if run.checkpointing else saved_bytes
    return TrainingMemory(
        weights=trained * types.trained + frozen * types.frozen,
        gradients=trained * types.trained,
        optimizer=2 * trained * types.trained,
        activations=count(stack, run.micro_batch, run.sequence, run.precision, run.fusing),
        loss=_loss_bytes(stack, run),
        workspace=_workspace_bytes(stack, run),
        keeps_gradients=run.accumulation > 1,
    )


def _loss_bytes(stack: Stack, run: Run) -> float:
    """What `training/loss.py` has at its widest moment; gradients it leaves are activations."""
    types = types_of(run.precision, stack.trains_all)
    width = types.computed
    # The model's output, which nothing saves but its caller holds.
    output = run.tokens * stack.hidden * types.stream
    logits = width * min(_LOSS_CHUNK, run.tokens) * stack.vocab
    # A chunk's logits become its gradient in place, and stay until the next chunk's are there.
    both = logits * (2 if run.tokens > _LOSS_CHUNK else 1)
    if not stack.trains_all:
        return output + both
    # The head's gradient in float32, and a chunk's part of it as it is computed and cast.
    head = stack.head_params
    part = width + (4 if width < 4 else 0)
    copies = head * width if types.casts else 0
    return output + max(both + 4 * head, logits + (4 + part) * head) + copies - head * types.trained


def _workspace_bytes(stack: Stack, run: Run) -> float:
    """Gradients inside one block's backward pass, the widest of FFN and norm."""
    width = types_of(run.precision, stack.trains_all).computed
    feed_forward = 3 * width * stack.base.intermediate
    norm = (4 * width if run.fused_blocks and stack.base.can_be_fused else 16) * stack.hidden
    return run.tokens * (max(feed_forward, norm) + 2 * width * stack.hidden)


def micro_batch_work(stack: Stack, run: Run) -> Work:
    """One forward and backward pass of one micro batch on one GPU."""
    types = types_of(run.precision, stack.trains_all)
    width, tokens = types.computed, run.tokens
    length = run.sequence / 2  # causal: half of the others, on average
    work = Work()
    for index in range(stack.depth):
        block, trains = stack.block(index), stack.trains(index)
        is_fused = run.fusing.applies(block)
        forward = forward_work(block, tokens, length, is_fused, width)
        work += forward
        if index >= stack.lowest:
            work += backward_work(block, tokens, length, is_fused, trains, width)
            work += forward if run.checkpointing else Work()
    chunks = -(-tokens // _LOSS_CHUNK)
    head = Work(
        matmul=2.0 * stack.head_params * tokens * (3 if stack.trains_all else 2),
        moved=_LOGIT_BYTES_MOVED / 2 * width * tokens * stack.vocab
        + (18.0 * stack.head_params * chunks if stack.trains_all else 0.0),
        launches=_LAUNCHES_A_CHUNK * chunks + _LAUNCHES_OUTSIDE,
    )
    casts = 6.0 * stack.params_trainable if types.casts else 0.0
    return work + head + Work(moved=casts)


def iteration_work(stack: Stack, run: Run) -> tuple[Work, Work]:
    """All micro batches of one iteration, and the optimizer's step; a GPU's share of both."""
    types = types_of(run.precision, stack.trains_all)
    trained = stack.params_trainable * types.trained / run.gpus
    # A gradient is read and added to what is there: three times its bytes, but for the first.
    added = Work(moved=3.0 * trained * (run.accumulation - 1))
    # Clipping reads and writes gradients; AdamW reads four tensors and writes three.
    step = Work(moved=(3 + 7) * trained)
    return micro_batch_work(stack, run).times(run.accumulation) + added, step

"""Many GPUs, on paper: full sharding of weights, gradients and optimizer states (FSDP).

Nothing here is measured. Every GPU works on micro batches of its own; activations stay whole; all
weights are gathered for the forward pass, those the backward pass visits once more, and gradients
of what trains are summed and scattered, once a micro batch. Links and network run at their data
sheets' rates and, in the step's time, beside the arithmetic: the best case.
"""

from dataclasses import dataclass, replace

from midus.efficiency.cost_activations import types_of
from midus.efficiency.cost_sizes import Stack
from midus.efficiency.cost_training import Run, TrainingMemory, training_memory
from midus.efficiency.gpus import NODE_SIZE, Gpu

# The block that runs and the one that is fetched ahead of it.
_WHOLE_BLOCKS = 2


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes one GPU receives in one micro batch."""

    gathered: float
    """Weights of the forward pass."""
    gathered_again: float
    """Weights of the backward pass."""
    scattered: float
    """Gradients of what trains."""
    link: float
    """All of it that passes this GPU's link inside the node."""
    network: float
    """This GPU's share of what the node receives from others."""

    def seconds(self, gpu: Gpu) -> float:
        """Link and network work at once; the slower one counts."""
        return max(self.link / (gpu.link_gbs * 1e9), self.network / (gpu.network_gbs * 1e9))


def sharded_memory(stack: Stack, run: Run) -> TrainingMemory:
    """The memory of one GPU of ``run.gpus``."""
    whole = training_memory(stack, run)
    if run.gpus == 1:
        return whole
    types = types_of(run.precision, stack.trains_all)
    largest = max(stack.base.params, stack.inserted.params if stack.inserted else 0)
    ends = stack.head_params * (1 if stack.is_tied else 2) + stack.hidden
    trained = stack.base if stack.trains_all or not stack.inserted else stack.inserted
    gathered = (ends + _WHOLE_BLOCKS * largest + trained.params) * types.computed
    return replace(
        whole,
        weights=whole.weights / run.gpus,
        gradients=whole.gradients / run.gpus,
        optimizer=whole.optimizer / run.gpus,
        gathered=gathered,
    )


def traffic(stack: Stack, run: Run) -> Traffic:
    """What one micro batch moves between GPUs."""
    width = types_of(run.precision, stack.trains_all).computed
    visited = sum(stack.block(index).params for index in range(stack.lowest, stack.depth))
    gathered = float(stack.params_total * width)
    gathered_again = float(visited * width)
    scattered = float(stack.params_trainable * width)
    total = gathered + gathered_again + scattered
    nodes = -(-run.gpus // NODE_SIZE)
    return Traffic(
        gathered=gathered,
        gathered_again=gathered_again,
        scattered=scattered,
        link=total * (run.gpus - 1) / run.gpus,
        network=total * (nodes - 1) / nodes / NODE_SIZE,
    )

"""`midus plan`: what training and serving a grown model would take, predicted without a GPU.

Formulas, assumptions and what of it is measured: `docs/plan.md`.
"""

from dataclasses import dataclass, replace
from typing import Any

from midus.efficiency.cost_serving import Serving, predict_serving
from midus.efficiency.cost_sharding import sharded_memory, traffic
from midus.efficiency.cost_sizes import Stack
from midus.efficiency.cost_time import bound_by, total_seconds
from midus.efficiency.cost_training import (
    Run,
    TrainingMemory,
    iteration_work,
    micro_batch_work,
)
from midus.efficiency.gpus import NODE_SIZE, SHARES, Gpu, Shares

# Beyond this neither answer would be of use.
_MOST_GPUS = 4096
_MOST_SEQUENCES = 65_536


@dataclass(frozen=True, kw_only=True)
class Training:
    """One method's training on so many GPUs."""

    run: Run
    memory: TrainingMemory
    fits: bool
    largest_micro_batch: int
    """Zero where not even one sequence fits."""
    flop_per_token: float
    flop_per_iteration: float
    """Of all GPUs."""
    moved_bytes: float
    """Elementwise bytes and the optimizer's, of one GPU and iteration."""
    seconds: float
    """Of an iteration; communication runs beside the arithmetic."""
    communication_seconds: float
    """Of an iteration; with none of it hidden, an iteration takes both."""
    bound: str

    @property
    def tokens_s(self) -> float:
        return self.run.tokens_per_iteration / self.seconds

    def hours(self, tokens: float) -> float:
        return tokens / self.tokens_s / 3600

    def gpu_hours(self, tokens: float) -> float:
        return self.hours(tokens) * self.run.gpus

    def to_dict(self, tokens: float, price: float) -> dict[str, Any]:
        return {
            "gpus": self.run.gpus,
            "tokens_per_iteration": self.run.tokens_per_iteration,
            "memory": self.memory.to_dict(),
            "fits": self.fits,
            "largest_micro_batch": self.largest_micro_batch,
            "gflop_per_token": self.flop_per_token / 1e9,
            "tflop_per_iteration": self.flop_per_iteration / 1e12,
            "moved_gb": self.moved_bytes / 1e9,
            "s_per_iter": self.seconds,
            "communication_s_per_iter": self.communication_seconds,
            "tokens_s": self.tokens_s,
            "hours": self.hours(tokens),
            "cost": self.gpu_hours(tokens) * price,
            "bound": self.bound,
            "is_measured": False,
        }


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Everything about one method."""

    name: str
    stack: Stack
    training: tuple[Training, ...]
    serving: Serving
    gpus_needed: int | None
    """GPUs over which training must be sharded to fit; None where no number does."""


def predict(
    name: str,
    stack: Stack,
    gpu: Gpu,
    run: Run,
    *,
    gpu_counts: tuple[int, ...] = (1,),
    context: int = 8192,
    batch: int = 1,
    shares: Shares = SHARES,
) -> Prediction:
    """Training on each number of GPUs, and serving on one.

    Args:
        name: How the method is called.
        stack: The model.
        gpu: The kind of GPU.
        run: How an iteration is trained; its ``gpus`` is replaced by each of ``gpu_counts``.
        gpu_counts: Numbers of GPUs.
        context: Tokens in the cache of each served sequence.
        batch: Sequences served at a time.
        shares: How much of its data sheet the GPU gives.
    """
    return Prediction(
        name=name,
        stack=stack,
        training=tuple(
            predict_training(stack, gpu, replace(run, gpus=count), shares) for count in gpu_counts
        ),
        serving=predict_serving(stack, gpu, shares, context, batch),
        gpus_needed=gpus_needed(stack, gpu, run),
    )


def predict_training(stack: Stack, gpu: Gpu, run: Run, shares: Shares = SHARES) -> Training:
    """One iteration on ``run.gpus`` GPUs."""
    memory = sharded_memory(stack, run)
    passes, step = iteration_work(stack, run)
    launch_us = shares.train_launch_us if run.launches_eagerly(stack) else 0.0
    computing = total_seconds(passes, gpu, shares, launch_us)
    talking = run.accumulation * traffic(stack, run).seconds(gpu) if run.gpus > 1 else 0.0
    operations = micro_batch_work(stack, run).operations
    return Training(
        run=run,
        memory=memory,
        fits=fits(memory, gpu),
        largest_micro_batch=largest_micro_batch(stack, gpu, run),
        flop_per_token=operations / run.tokens,
        flop_per_iteration=operations * run.accumulation * run.gpus,
        moved_bytes=passes.moved + step.moved,
        seconds=max(computing, talking) + total_seconds(step, gpu, shares, shares.train_launch_us),
        communication_seconds=talking,
        bound="communication" if talking > computing else bound_by(passes, gpu, shares, launch_us),
    )


def fits(memory: TrainingMemory, gpu: Gpu) -> bool:
    return memory.total <= gpu.memory_gb * 1e9


def largest_micro_batch(stack: Stack, gpu: Gpu, run: Run) -> int:
    """The most sequences of one pass that fit, 0 where not even one does."""

    def does_fit(size: int) -> bool:
        return fits(sharded_memory(stack, replace(run, micro_batch=size)), gpu)

    low, high = 0, 1
    while high <= _MOST_SEQUENCES and does_fit(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does_fit(middle) else (low, middle)
    return low


def gpus_needed(stack: Stack, gpu: Gpu, run: Run) -> int | None:
    """The fewest GPUs over which the run fits: whole numbers up to a node, then whole nodes."""
    counts: list[int] = [*range(1, NODE_SIZE + 1)]
    counts += range(2 * NODE_SIZE, _MOST_GPUS + 1, NODE_SIZE)
    for count in counts:
        if fits(sharded_memory(stack, replace(run, gpus=count)), gpu):
            return count
    return None


def fit_sentence(prediction: Prediction, gpu: Gpu, run: Run) -> str:
    """Whether the run fits one GPU, and otherwise how many it takes."""
    one = sharded_memory(prediction.stack, replace(run, gpus=1))
    size = f"{one.total / 1e9:.1f} of {gpu.memory_gb:g} GB"
    if fits(one, gpu):
        return f"{prediction.name} fits on one {gpu.name.upper()} ({size})"
    if prediction.gpus_needed is None:
        return (
            f"{prediction.name} does not fit on any number of {gpu.name.upper()} ({size} on one); "
            "shorten the sequence, lower the micro batch or use --checkpointing"
        )
    return f"{prediction.name} needs {prediction.gpus_needed} ({size} on one)"

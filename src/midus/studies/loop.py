"""One trial's training: the steps of `midus train` without its trainer.

Groups, schedule, clipping, loss and the optimizer's arguments are the ones `midus train` uses; the
data are on the device already, and nothing waits for the device within a step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, set_seed

from midus.errors import MidusError
from midus.models.fused_base import fuse_blocks
from midus.studies.scoring import computing
from midus.training.arguments import make_arguments
from midus.training.controls import causal_lm
from midus.training.graphed import GraphedStep, why_failed, why_not_graphed
from midus.training.key_start import NUM_TOKENS, start_keys_from_queries
from midus.training.loss import use_chunked_loss
from midus.training.optim import (
    constant_memory_schedule,
    group_name,
    make_clipping,
    make_optimizer,
)
from midus.training.options import TrainOptions
from midus.training.stream_size import streams_of_memory
from midus.training.weight_size import weight_size

Step = Callable[[Tensor], Tensor]
LossOf = Callable[[dict[str, Tensor]], Tensor]


class Loop:
    """A model on its way through its sequences.

    Args:
        model: As `Material.start` gives it.
        options: Of the trial, with ``trainer.max_steps``.
        sequences: Training sequences on the device, ``[S, T]``.
    """

    def __init__(self, model: Any, options: TrainOptions, sequences: Tensor) -> None:
        if len(sequences) < options.batch_size:
            raise MidusError(
                f"the data make {len(sequences)} sequences, fewer than "
                f"batch_size={options.batch_size}; give more data, or a smaller batch_size"
            )
        set_seed(options.seed)
        self.model, self.options, self.sequences = model, options, sequences
        arguments = make_arguments(options, has_held_out=False)
        self.num_steps: int = arguments.max_steps
        self.done = 0
        """Steps so far."""
        self.loss = torch.zeros((), device=sequences.device)
        """Sum of the steps' losses since it was last taken."""
        self.grad_norm = torch.zeros((), device=sequences.device)
        """Of all gradients in the last step, before they were clipped."""
        self._micro: int = arguments.per_device_train_batch_size
        self._order = data_order(
            len(sequences), options.batch_size, self.num_steps, options.seed
        ).to(sequences.device)
        inner = causal_lm(model)
        if options.fused_blocks:
            fuse_blocks(inner)
        use_chunked_loss(inner, options.loss_chunk)
        model.train()
        if options.key_start == "queries":
            self._start_keys()
        num_predicted = options.batch_size * (sequences.shape[1] - 1)
        self._loss_of = make_loss(model, options, num_predicted)
        self._step = eager_step(self._loss_of)
        self.why_not_graphed = "cuda_graphs is false"
        """What keeps steps from being CUDA graphs; empty if nothing."""
        if options.cuda_graphs:
            self.why_not_graphed = why_not_graphed(model, ["input_ids"])
        self._is_to_be_graphed = not self.why_not_graphed
        self.is_graphed = False
        """Whether steps have become graphs: not before the optimizer has stepped once."""
        optimizer = options.optimizer
        if optimizer.is_relative:
            optimizer = optimizer.absolute(weight_size(model), self.num_steps)
        kind = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        streams = self._streams() if optimizer.is_by_stream else None
        self.optimizer = make_optimizer(model, optimizer, kind, streams)
        self.rates: dict[str, float] = {
            group_name(group): group["lr"] for group in self.optimizer.param_groups
        }
        """Of each group of parameters where its schedule is highest, relative ones worked out."""
        self.schedule = constant_memory_schedule(
            self.optimizer,
            self.num_steps,
            optimizer.warmup_ratio,
            optimizer.schedule,
            optimizer.decay_ratio,
            optimizer.parts,
        )
        self._clip = make_clipping(model, arguments.max_grad_norm, optimizer.parts)

    def step(self, before_update: Callable[[], None] | None = None) -> None:
        """One step of the optimizer.

        Args:
            before_update: Called while the gradients are there and not clipped yet.
        """
        size = self.options.batch_size
        rows = self._order[self.done * size : (self.done + 1) * size]
        for micro in rows.split(self._micro):
            ids = self.sequences[micro].long()
            # A graph takes its memory after the optimizer has taken its own.
            if self._is_to_be_graphed and self.optimizer.state:
                self._is_to_be_graphed = False
                try:
                    self._step = graphed_step(self.model, self._loss_of, ids)
                    self.is_graphed = True
                except RuntimeError as error:
                    self.why_not_graphed = why_failed(error)
            self.loss += self._step(ids)
        if before_update is not None:
            before_update()
        self.grad_norm = self._clip()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.done += 1

    def end(self) -> None:
        """Frees what steps alone need; what an unfinished trial is saved by stays."""
        self._step = eager_step(self._loss_of)  # without the graph, which holds activations
        self.optimizer.zero_grad()

    def take_loss(self, num_steps: int) -> float:
        """Mean loss of the steps since it was last taken; waits for the device."""
        mean = self.loss.item() / max(num_steps, 1)
        self.loss.zero_()
        return mean

    def _start_keys(self) -> None:
        with computing(self.options, self.sequences.device):
            start_keys_from_queries(self.model, self._first_batches(), self.options.seed)

    def _streams(self) -> list[float]:
        with computing(self.options, self.sequences.device):
            return streams_of_memory(self.model, self._first_batches())

    def _first_batches(self) -> Sequence[Tensor]:
        num = -(-NUM_TOKENS // self.sequences.shape[1])
        batches: Sequence[Tensor] = self.sequences[:num].long().split(self._micro)
        return batches


def make_loss(model: Any, options: TrainOptions, num_predicted: int) -> LossOf:
    """A micro batch's share of a step's loss.

    Args:
        model: A model whose loss is chunked.
        options: Of the trial.
        num_predicted: Tokens that are predicted in one step of the optimizer.
    """

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        with computing(options, ids.device):
            loss: Tensor = model(input_ids=ids, labels=ids, num_items_in_batch=num_predicted).loss
        return loss

    return loss_of


def eager_step(loss_of: LossOf) -> Step:
    """Forward and backward of a micro batch ``[B, T]``: its loss; the gradients are added."""

    def step(ids: Tensor) -> Tensor:
        loss = loss_of({"input_ids": ids})
        loss.backward()
        return loss.detach()

    return step


def graphed_step(model: Any, loss_of: LossOf, example: Tensor) -> Step:
    """The same as one CUDA graph."""
    graphed = GraphedStep(model, loss_of, {"input_ids": example})
    return lambda ids: graphed({"input_ids": ids})


def data_order(num_sequences: int, batch_size: int, num_steps: int, seed: int) -> Tensor:
    """Which sequence comes when, as `midus train` shuffles: one permutation a pass.

    The sequences that fill no step at the end of a pass are left out of it. Pass p of seed s is
    pass 0 of seed s + p, so seeds of one study are further apart than it has passes.
    """
    steps_a_pass = num_sequences // batch_size
    passes = []
    for epoch in range(math.ceil(num_steps / steps_a_pass)):
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(num_sequences, generator=generator)
        passes.append(order[: steps_a_pass * batch_size])
    return torch.cat(passes)[: num_steps * batch_size]

"""One training iteration: 16 sequences of 2,048 tokens, one at a time, then one optimizer step.

The paper's protocol (Appendix "Additional efficiency experiments"): weights, gradients and AdamW's
states in bfloat16, no recomputation. What trains is what the method trains; for the base, all.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from midus.efficiency.gpu_memory import peak_gb, start_peak
from midus.efficiency.timing import time_runs
from midus.models.fused_base import fuse_blocks
from midus.models.record import set_trainable
from midus.training.graphed import Batch, GraphedStep, why_not_graphed
from midus.training.loss import use_chunked_loss
from midus.training.optim import parameter_groups
from midus.training.optimizer_options import OptimizerOptions
from midus.training.options import TrainOptions

MAX_GRAD_NORM = 1.0
_LOSS_CHUNK: int = TrainOptions.loss_chunk
_OPTIONS = OptimizerOptions().resolved("cpt")
_BETAS = (0.9, _OPTIONS.adam_beta2 or 0.999)
_LR = _OPTIONS.lr or 1e-4

# What a result says of training besides its protocol.
SETTINGS: dict[str, Any] = {
    "lr": _LR,
    "adam_betas": _BETAS,
    "weight_decay": _OPTIONS.weight_decay,
    "max_grad_norm": MAX_GRAD_NORM,
    "loss_chunk": _LOSS_CHUNK,
    "gradient_checkpointing": False,
}


def prepare_training(model: Any, fused_blocks: bool) -> None:
    """Freezes what the method freezes, fuses blocks, chunks the loss; once for a model."""
    set_trainable(model)
    if fused_blocks:
        fuse_blocks(model)
    use_chunked_loss(model, _LOSS_CHUNK)
    model.train()


def make_optimizer(model: Any, device: torch.device) -> torch.optim.AdamW:
    """AdamW with the paper's rates and groups; states have the weights' type."""
    groups = parameter_groups(model, _LR, _OPTIONS.memory_lr, _OPTIONS.weight_decay or 0.0)
    return torch.optim.AdamW(groups, lr=_LR, betas=_BETAS, fused=device.type == "cuda")


def optimizer_name(device: torch.device, dtype: str) -> str:
    """AdamW, how it runs and what its states are, for the row."""
    return f"AdamW{' fused' if device.type == 'cuda' else ''}, {dtype} states"


def measure_training(
    model: Any,
    device: torch.device,
    *,
    sequence: int,
    micro_batch: int,
    accumulation: int,
    repeats: int,
    warmup: int,
    cuda_graphs: bool,
) -> dict[str, Any]:
    """Median seconds, spread and peak memory of an iteration, the warm-up's memory included.

    With graphs the warm-up is eager: the optimizer's states are there when the graph takes its
    memory, so that the peak is one of both.
    """
    try:
        start_peak(device)
        optimizer = make_optimizer(model, device)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        shape = (accumulation, micro_batch, sequence)
        tokens = torch.randint(model.config.vocab_size, shape, device=device)
        num_predicted = torch.tensor(accumulation * micro_batch * (sequence - 1), device=device)
        batches = [
            {"input_ids": batch, "labels": batch, "num_items_in_batch": num_predicted}
            for batch in tokens.unbind(0)
        ]

        def loss_of(batch: Batch) -> Tensor:
            loss: Tensor = model(**batch).loss
            return loss

        def iterate(step: Callable[[Batch], Any]) -> None:
            for batch in batches:
                step(batch)
            torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        eager = partial(iterate, lambda batch: loss_of(batch).backward())
        is_graphed = cuda_graphs and not why_not_graphed(model, batches[0])
        if is_graphed:
            time_runs(eager, device, warmup)
            graphed = partial(iterate, GraphedStep(model, loss_of, batches[0]))
            seconds = time_runs(graphed, device, repeats, warmup)
        else:
            seconds = time_runs(eager, device, repeats, warmup)
        return {
            "train_graphed": is_graphed,
            "train_s_per_iter": statistics.median(seconds),
            "train_s_spread": max(seconds) - min(seconds),
            "train_tokens_per_iter": tokens.numel(),
            "train_gb": peak_gb(device),
        }
    finally:
        model.zero_grad(set_to_none=True)

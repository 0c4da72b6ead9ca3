"""One training run from options to a better model: data, model, trainer, result."""

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from midus.data import (
    DataOptions,
    PreparedRows,
    PreparedText,
    prepare_text,
    read_instructions,
)
from midus.errors import MidusError
from midus.models.atomic import atomic_folder
from midus.models.fused_base import fuse_blocks
from midus.models.loading import load_tokenizer
from midus.models.record import inserted_positions
from midus.reports import conditions, machine_name
from midus.training.arguments import count_steps, make_arguments
from midus.training.checkpoint import last_checkpoint, replace_text, write_weights
from midus.training.continuing import MODEL_NAME, check_data, locked, open_run
from midus.training.controls import causal_lm
from midus.training.distributed import first_rank_first, from_first_rank, is_first_rank
from midus.training.feasible import refuse_impossible
from midus.training.freezing import count_trainable
from midus.training.key_start import first_batches, start_keys_from_queries
from midus.training.loss import use_chunked_loss
from midus.training.optim import groups_of
from midus.training.optimizer_options import OptimizerOptions
from midus.training.options import TrainOptions
from midus.training.plots import plot_losses
from midus.training.starting import Start, start_model
from midus.training.stream_size import streams_of_memory
from midus.training.trainer import CptTrainer, sft_trainer_class
from midus.training.watching import (
    GuardCallback,
    MetricsCallback,
    ProgressCallback,
    read_metrics,
)
from midus.training.weight_size import weight_size
from midus.upscaling.method import Track

RESULT_NAME = "result.json"


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    model: Path
    """Folder of the trained model: a delta where the base was frozen."""
    steps: int
    tokens: int
    seconds: float
    """Of this process; a resumed run counts from its resumption."""
    losses: dict[str, float | None]
    """Held-out loss and perplexity before and after."""
    plot: Path | None
    """Picture of the losses; None where matplotlib is not installed."""


def train(
    options: TrainOptions,
    *,
    resume: bool = False,
    track: Track = lambda items, _: items,
    say: Callable[[str], None] = lambda _: None,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainResult:
    """Trains, and leaves model, metrics, plot and result in ``options.output``.

    Args:
        options: What to do.
        resume: Go on from the newest checkpoint in the output, or begin if there is none.
        track: Wraps loops in a progress bar.
        say: Is told in a sentence what happens.
        callbacks: Of the trainer, besides ours. To stop a run that is to go on later, raise in
            ``on_save``: a run that was told to stop by ``control`` counts as one that has ended.
    """
    from accelerate import PartialState

    on_cpu = not torch.cuda.is_available() or options.trainer.get("use_cpu", False)
    world = PartialState(cpu=on_cpu)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        options = replace(options, sharding="fsdp2")  # as accelerate's settings say
    run = Path(options.output)
    with locked(run) if world.is_main_process else nullcontext():
        return _train_in(run, options, world, resume, track, say, callbacks)


def _train_in(
    run: Path,
    options: TrainOptions,
    world: Any,
    resume: bool,
    track: Track,
    say: Callable[[str], None],
    callbacks: Sequence[TrainerCallback],
) -> TrainResult:
    if world.is_main_process:
        open_run(run, options, resume)
    world.wait_for_everyone()
    checkpoint = last_checkpoint(run) if resume else None
    trainer, start = make_trainer(options, world.num_processes, track, say)
    check_data(run, trainer.data_identity, bool(checkpoint), world.is_main_process)
    for callback in callbacks:
        trainer.add_callback(callback)
    started = time.perf_counter()
    if checkpoint and trainer.take_finished(checkpoint):
        say(f"{checkpoint} is the end of the run; nothing is left to train")
    else:
        _train(trainer, checkpoint, say)
    seconds = time.perf_counter() - started
    _write_model(trainer, start, run / MODEL_NAME)
    return _finish(trainer, options, run, seconds)


def _train(trainer: Any, checkpoint: Path | None, say: Callable[[str], None]) -> None:
    if checkpoint:
        say(f"resuming from {checkpoint}")
        trainer.args.eval_on_start = False  # the run has that number already
    bar = ProgressCallback()
    trainer.add_callback(bar)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        bar.close()


def make_trainer(
    options: TrainOptions,
    world_size: int = 1,
    track: Track = lambda items, _: items,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Any, Start]:
    """The trainer with model and data, ready to train, and what it starts from."""
    sharded = options.sharding == "fsdp2" and world_size > 1
    refuse_impossible(options, sharded)
    tokenizer = load_tokenizer(options.model)
    with first_rank_first():
        train_data, held_out, identity = _data(options, tokenizer, track, say)
    arguments = make_arguments(options, held_out is not None, world_size)
    start = start_model(options, is_empty=sharded and not is_first_rank(), track=track)
    start = replace(start, saves_delta=from_first_rank(start.saves_delta))
    _refuse_running_statistics(start.model, arguments)
    if options.fused_blocks:
        fuse_blocks(causal_lm(start.model))
    use_chunked_loss(causal_lm(start.model), options.loss_chunk)
    _warn_of_first_block(options, start, say)
    num_steps = count_steps(arguments, len(train_data), options.batch_size)
    options = replace(options, optimizer=_rates(options.optimizer, start, num_steps, say))
    _say_idle_parts(options.optimizer, start.model, say)
    trainer = _make_trainer(options, arguments, start, train_data, held_out, tokenizer)
    trainer.cuda_graphs, trainer.data_identity = options.cuda_graphs, identity
    _refuse_too_few(len(trainer.train_dataset), options.batch_size)
    if options.key_start == "queries":
        _start_keys(trainer, options)
    if options.optimizer.is_by_stream:
        trainer.streams = _streams(trainer, say)
    if len(trainer.train_dataset) < len(train_data):
        dropped = len(train_data) - len(trainer.train_dataset)
        say(f"{dropped:,} examples whose prompts alone fill max_length were left out")
    _watch(trainer, options)
    share = count_trainable(start.model) / sum(p.numel() for p in start.model.parameters())
    say(
        f"{count_trainable(start.model):,} parameters train ({100 * share:.2f} %), "
        f"{len(trainer.train_dataset):,} "
        f"{'sequences' if options.stage == 'cpt' else 'examples'}"
    )
    return trainer, start


def _say_idle_parts(optimizer: OptimizerOptions, model: Any, say: Callable[[str], None]) -> None:
    busy = {group["name"] for group in groups_of(model, optimizer)}
    for name in sorted(optimizer.parts.keys() - busy):
        say(f"note: optimizer.parts.{name} has no effect, since nothing of that name trains")


def _warn_of_first_block(options: TrainOptions, start: Start, say: Callable[[str], None]) -> None:
    is_fast = options.stage == "cpt" and options.optimizer.recipe == "short"
    # No copied block stands there: each has one of the base to its left.
    if is_fast and 0 in inserted_positions(causal_lm(start.model).config):
        say(
            "warning: a memory block stands before the base's first block, where the stream is "
            "smallest, and at the rates of short runs models learned less and forgot more with one "
            "there; use upscale.placement: dense, or at most half as many blocks as the base"
        )


def _rates(
    optimizer: OptimizerOptions, start: Start, num_steps: int, say: Callable[[str], None]
) -> OptimizerOptions:
    """With rates in the place of multiples of the size of the base's weights, and says them."""
    if not optimizer.is_relative:
        return optimizer
    size = from_first_rank(None if start.is_empty else weight_size(start.model))
    rates = optimizer.absolute(size, num_steps)
    steps = f" for {num_steps:,} steps" if optimizer.goes_with_steps else ""
    own = [
        f"{name} {part.lr:.2e}"
        for name, part in rates.parts.items()
        if optimizer.parts[name].relative_lr is not None
    ]
    said = ", ".join([f"lr {rates.lr:.2e}", *own])
    say(f"the base's weights have size {size:.4f}, which makes {said}{steps}")
    return rates


def _start_keys(trainer: Any, options: TrainOptions) -> None:
    batches = first_batches(trainer.train_dataset, trainer.args.per_device_train_batch_size)
    with trainer.accelerator.autocast():
        start_keys_from_queries(trainer.model, batches, options.seed)


def _streams(trainer: Any, say: Callable[[str], None]) -> list[float]:
    """Size of the stream before each memory block, and says it."""
    batches = first_batches(trainer.train_dataset, trainer.args.per_device_train_batch_size)
    with trainer.accelerator.autocast():
        found = streams_of_memory(trainer.model, batches)
    sizes: list[float] = from_first_rank(found)
    say(
        f"the stream has size {sizes[0]:.3g} before the first memory block and {sizes[-1]:.3g} "
        "before the last"
    )
    return sizes


def _make_trainer(
    options: TrainOptions,
    arguments: Any,
    start: Start,
    train_data: Any,
    held_out: Any,
    tokenizer: Any,
) -> Any:
    common = {
        "model": start.model,
        "args": arguments,
        "train_dataset": train_data,
        "eval_dataset": held_out,
        "optimizer_options": options.optimizer,
        "saves_delta": start.saves_delta,
        "tokenizer": tokenizer,
    }
    try:
        if options.stage == "sft":
            return sft_trainer_class()(**common, processing_class=tokenizer)
        from transformers import default_data_collator

        # Without the tokenizer, by which the trainer would rewrite the model's special tokens.
        return CptTrainer(**common, data_collator=default_data_collator)
    except (ValueError, RuntimeError, ImportError) as error:
        raise MidusError(f"trainer: {str(error).strip().splitlines()[0]}") from error


def _refuse_running_statistics(model: Any, arguments: Any) -> None:
    memory = getattr(model.config, "memory", None) or {}
    if arguments.gradient_checkpointing and memory.get("query_norm") == "batch":
        raise MidusError(
            "gradient_checkpointing runs each block twice a step, and query_norm='batch' would "
            "count its statistics twice; leave one of them out"
        )


def _refuse_too_few(found: int, batch_size: int) -> None:
    if found < batch_size:
        raise MidusError(
            f"the data make {found} sequences, fewer than batch_size={batch_size}; give more data, "
            "or a smaller batch_size or data.seq_len"
        )


def _data(
    options: TrainOptions, tokenizer: Any, track: Track, say: Callable[[str], None]
) -> tuple[Any, Any, str]:
    """What is trained on, what is held out if anything is, and what stands for both."""
    read: PreparedText | PreparedRows
    first = ""
    if options.stage == "cpt":
        read = prepare_text(_enough(options), options.model, track)
        for note in read.notes:
            say(note)
    else:
        _quieten_datasets()
        read = read_instructions(options.data, tokenizer)
        first = f"; the first is {read.bad_row_names[0]}" if read.bad_rows else ""
    if read.bad_rows:
        say(f"{read.bad_rows:,} bad rows were left out of the data{first}")
    _refuse_too_few(len(read.train), options.batch_size)
    has_held_out = read.held_out is not None and len(read.held_out)
    return read.train, read.held_out if has_held_out else None, read.identity


def _enough(options: TrainOptions) -> DataOptions:
    """No more text than the steps read, so that a large corpus is not tokenised for a short run."""
    steps = options.trainer.get("max_steps", -1)
    is_number = isinstance(steps, int | float) and not isinstance(steps, bool)
    if options.data.max_tokens is not None or not is_number or not 0 < steps < math.inf:
        return options.data  # what is no number of steps is refused with the other arguments
    return replace(options.data, max_tokens=int(steps) * options.batch_size * options.data.seq_len)


def _quieten_datasets() -> None:
    """The library's bars show on terminals only, like ours."""
    if not sys.stderr.isatty() and importlib.util.find_spec("datasets"):
        import datasets

        datasets.disable_progress_bars()


def _watch(trainer: Any, options: TrainOptions) -> None:
    from transformers import EarlyStoppingCallback, PrinterCallback

    trainer.remove_callback(PrinterCallback)
    run = Path(options.output)
    metrics = MetricsCallback(trainer, run)
    trainer.extra_metrics, trainer.paused = metrics.extra, metrics.paused
    trainer.add_callback(metrics)
    trainer.add_callback(GuardCallback(trainer, run))
    if options.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(options.early_stopping_patience))


def _write_model(trainer: Any, start: Start, target: Path) -> None:
    """The trained model in the type of the checkpoint it came from, in one atomic step."""
    trainer.accelerator.wait_for_everyone()
    if target.is_dir():
        return  # whole, since it has its name
    model = trainer._bare_model()
    if not trainer.args.should_save:
        write_weights(model, target, delta=start.saves_delta, keep=False)
        return
    with atomic_folder(target) as work:
        write_weights(
            model,
            work,
            delta=start.saves_delta,
            keep=True,
            tokenizer=trainer.tokenizer,
            dtype=start.stored_dtype,
        )


def _finish(trainer: Any, options: TrainOptions, run: Path, seconds: float) -> TrainResult:
    rows = read_metrics(run)
    steps = trainer.state.global_step
    held_out = {row["step"]: row for row in rows if "eval_loss" in row}
    losses: dict[str, float | None] = {}
    end = trainer.state.best_global_step if options.keep_best else steps
    for name, step in (("before", 0), ("after", end)):
        row = held_out.get(step, {})
        losses[f"{name}_loss"] = row.get("eval_loss")
        losses[f"{name}_perplexity"] = row.get("eval_perplexity")
    # A missing picture is no reason to lose the end of a run.
    plot = run / "loss.png" if importlib.util.find_spec("matplotlib") else None
    tokens = int(trainer.state.num_input_tokens_seen)
    if trainer.args.should_save:
        if plot:
            plot_losses(rows, plot, f"{options.stage} of {options.model}, {steps:,} steps")
        result = {
            "steps": steps,
            "tokens": tokens,
            "seconds_since_start_or_resume": seconds,
            "examples": len(trainer.train_dataset),
            "trainable": count_trainable(trainer._bare_model()),
            **losses,
            "hardware": hardware(),
            "conditions": conditions(),
        }
        replace_text(run / RESULT_NAME, json.dumps(result, indent=2) + "\n")
    return TrainResult(run / MODEL_NAME, steps, tokens, seconds, losses, plot)


def hardware() -> str:
    """The device that trained, and how many of it this machine has."""
    if not torch.cuda.is_available():
        return machine_name()
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"

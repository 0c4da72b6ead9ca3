"""Our options as the arguments of Hugging Face's trainer."""

import difflib
import importlib.util
import math
import os
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from midus.errors import MidusError
from midus.training.distributed import FSDP2
from midus.training.options import TrainOptions

_SMALLEST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "dataloader_num_workers": 0,
    "max_grad_norm": 0,
    "logging_steps": 0,
    "save_steps": 0,
    "eval_steps": 0,
}


def make_arguments(options: TrainOptions, has_held_out: bool, world_size: int = 1) -> Any:
    """TrainingArguments, or TRL's SFTConfig for fine-tuning.

    Args:
        options: Options of the run, the optimizer's resolved.
        has_held_out: Whether there is held-out data to evaluate on.
        world_size: Number of processes.
    """
    cls = _arguments_class(options.stage)
    trainer = dict(options.trainer)
    _refuse_unknown(trainer, cls)
    _refuse_wrong_types(trainer, cls)
    per_device = trainer.setdefault("per_device_train_batch_size", min(8, options.batch_size))
    for name, smallest in _SMALLEST.items():
        value = trainer.get(name)
        if value is not None and value < smallest:
            raise MidusError(f"trainer.{name}={value!r} must be at least {smallest}")
    epochs = trainer.get("num_train_epochs", 1)
    if trainer.get("max_steps", -1) <= 0 and not 0 < epochs < math.inf:
        raise MidusError(f"trainer.num_train_epochs={epochs!r} must be a number above 0")
    accumulation, rest = divmod(options.batch_size, per_device * world_size)
    if rest or not accumulation:
        raise MidusError(
            f"batch_size={options.batch_size} is not a multiple of "
            f"per_device_train_batch_size={per_device} times {world_size} processes; change one"
        )
    on_gpu = torch.cuda.is_available() and not trainer.get("use_cpu", False)
    every = trainer.get("eval_steps", trainer.get("save_steps", 500))
    values: dict[str, Any] = {
        "per_device_eval_batch_size": per_device,
        "logging_steps": 10,
        "save_steps": every,
        "save_total_limit": 2,
        "report_to": ["tensorboard"] if importlib.util.find_spec("tensorboard") else "none",
        "dataloader_drop_last": True,
        "ddp_find_unused_parameters": False,
        **trainer,
        "output_dir": options.output,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": options.optimizer.lr or 0.0,  # the groups have their own
        "weight_decay": options.optimizer.weight_decay,
        "adam_beta2": options.optimizer.adam_beta2,
        "seed": options.seed,
        "data_seed": options.seed,
        "bf16": on_gpu and options.precision == "mixed",
        "use_cpu": not on_gpu,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        # What the model's config says stays; the loss asks for no cache itself.
        "use_cache": True,
        # Examples of instructions differ in length, and padding is no token read.
        "include_num_input_tokens_seen": "all" if options.stage == "cpt" else "non_padding",
    }
    if has_held_out:
        values = {
            "eval_strategy": "steps",
            "eval_steps": every,
            "eval_on_start": True,
            **values,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": False,
            "load_best_model_at_end": options.keep_best,
        }
        if options.early_stopping_patience and str(values["eval_strategy"]) == "no":
            raise MidusError(
                "early_stopping_patience waits for evaluations, and trainer.eval_strategy='no' has "
                "none; leave one of them out"
            )
    elif options.keep_best or options.early_stopping_patience:
        raise MidusError(
            "keep_best and early_stopping_patience need held-out data; set data.held_out or "
            "data.eval_sources"
        )
    if options.sharding == "fsdp2" and world_size > 1 and "ACCELERATE_USE_FSDP" not in os.environ:
        values |= {"fsdp": True, "fsdp_config": {**FSDP2, **trainer.get("fsdp_config", {})}}
    if options.stage == "cpt":
        values["remove_unused_columns"] = False
    else:
        values = {"packing": False, **values, "max_length": options.max_length}
    try:
        return cls(**values)
    except (TypeError, ValueError, ImportError, OSError) as error:
        raise MidusError(f"trainer: {str(error).splitlines()[0]}") from error


def count_steps(arguments: Any, num_examples: int, batch_size: int) -> int:
    """Steps of a run, before its trainer counts them.

    Args:
        arguments: Of the trainer.
        num_examples: Examples of a pass.
        batch_size: Examples of a step.
    """
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    accumulation = arguments.gradient_accumulation_steps
    batches = num_examples // (batch_size // accumulation)
    # As the trainer has it: what is left of a pass makes a last step, smaller than the others.
    steps: int = math.ceil(arguments.num_train_epochs * max(1, math.ceil(batches / accumulation)))
    return max(1, steps)


def _arguments_class(stage: str) -> Any:
    if stage == "cpt":
        from transformers import TrainingArguments

        return TrainingArguments
    if importlib.util.find_spec("trl") is None:
        raise MidusError("stage 'sft' needs the package trl; run: pip install 'midus[train]'")
    from trl import SFTConfig

    return SFTConfig


def _refuse_unknown(trainer: dict[str, Any], cls: Any) -> None:
    known = [f.name for f in fields(cls) if f.init]
    for name in trainer:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise MidusError(f"trainer.{name} is no argument of {cls.__name__}{hint}")


def _refuse_wrong_types(trainer: dict[str, Any], cls: Any) -> None:
    """Plain arguments only: a mapping or an enumeration is the class's own to check."""
    plain = {int, float, bool, str, type(None)}
    hints = get_type_hints(cls)
    for name, value in trainer.items():
        is_union = get_origin(hints[name]) in (Union, UnionType)
        kinds = set(get_args(hints[name])) if is_union else {hints[name]}
        if not kinds <= plain:
            continue
        if int in kinds and isinstance(value, float) and value.is_integer():
            value = trainer[name] = int(value)  # 1e3 is a number of steps, too
        wanted = kinds | ({int} if float in kinds else set())
        if type(value) not in wanted:
            names = " or ".join(sorted(kind.__name__ for kind in kinds - {type(None)}))
            raise MidusError(f"trainer.{name}={value!r} must be of type {names}")

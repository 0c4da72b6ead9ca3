"""Our options as the arguments of Hugging Face's trainer."""

import difflib
import importlib.util
import os
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import torch

from midus.errors import MidusError
from midus.training.distributed import FSDP2
from midus.training.options import TrainOptions


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
        "learning_rate": options.optimizer.lr,
        "weight_decay": options.optimizer.weight_decay,
        "adam_beta2": options.optimizer.adam_beta2,
        "seed": options.seed,
        "data_seed": options.seed,
        "bf16": on_gpu and options.precision == "mixed",
        "use_cpu": not on_gpu,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
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
        # Examples differ in length: tokens are counted as they come, padding apart.
        values = {
            "packing": False,
            "include_num_input_tokens_seen": "non_padding",
            **values,
            "max_length": options.max_length,
        }
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise MidusError(f"trainer: {str(error).splitlines()[0]}") from error


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
        kinds = set(get_args(hints[name]) or [hints[name]])
        if not kinds <= plain:
            continue
        wanted = kinds | ({int} if float in kinds else set())
        if type(value) not in wanted:
            names = " or ".join(sorted(kind.__name__ for kind in kinds - {type(None)}))
            raise MidusError(f"trainer.{name}={value!r} must be of type {names}")

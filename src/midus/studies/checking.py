"""What a study refuses before anything runs: options said elsewhere, ignored, or impossible."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from midus.errors import MidusError
from midus.studies.trials import Trial
from midus.training.options import TrainOptions

# What the study itself decides for every trial.
_OWN = {
    "seed": "seeds",
    "upscale.seed": "seeds",
    "output": "--out",
    "stage": "nothing, since every trial is continual pre-training",
}
# Arguments of the trainer that the loop of a study goes by.
_USED_ARGUMENTS = (
    "per_device_train_batch_size",
    "max_grad_norm",
    "optim",
    "optim_args",
    "adam_beta1",
    "adam_epsilon",
    "max_steps",
)
_USED_DATA = ("sources", "seq_len", "max_tokens")
_UNUSED = ("load_in_4bit", "sharding", "keep_best", "early_stopping_patience", "max_length")


def refuse_own(where: str, names: Iterable[str]) -> None:
    """Refuses options that a study sets itself.

    Args:
        where: Who gives them, for messages.
        names: Options with dots.
    """
    for name in names:
        if name in _OWN:
            raise MidusError(
                f"{where}.{name} is said elsewhere in a study; use {_OWN[name]} instead"
            )


def refuse_ignored(options: TrainOptions) -> None:
    """Refuses what `midus train` would follow and a study would not."""
    found = [f"trainer.{name}" for name in options.trainer if name not in _USED_ARGUMENTS]
    found += [name for name in _UNUSED if name in _changed(options)]
    found += [f"data.{name}" for name in _changed(options.data) if name not in _USED_DATA]
    if found:
        raise MidusError(f"{found[0]} has no effect in a study; leave it out")


def check_trials(trials: list[Trial], base_config: Any) -> None:
    """Refuses what some trial could not do, before the first one runs."""
    seen = set()
    for trial in trials:
        options = trial.options
        facts = repr(
            (
                options.upscale,
                options.control,
                options.key_start,
                options.trainer,
                options.batch_size,
            )
        )
        if facts in seen:
            continue
        seen.add(facts)
        try:
            _check(options, base_config)
        except MidusError as error:
            raise MidusError(f"methods.{trial.method}: {error}") from error


def _check(options: TrainOptions, base_config: Any) -> None:
    from midus.training.arguments import make_arguments
    from midus.training.controls import check_control
    from midus.training.feasible import refuse_impossible

    refuse_impossible(options, base_config=base_config)
    check_control(options.control)
    _check_optimizer(make_arguments(options, has_held_out=False))


def _check_optimizer(arguments: Any) -> None:
    from transformers import Trainer

    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments, None)
    except (ImportError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise MidusError(
            f"trainer.optim={str(arguments.optim)!r} cannot be used here ({reason}); install what "
            "it needs, or choose another"
        ) from error


def _changed(options: Any) -> list[str]:
    return [f.name for f in fields(options) if getattr(options, f.name) != f.default]

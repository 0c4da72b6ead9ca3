"""What a run would do, told from configs alone: no weights, no data."""

from typing import Any

from midus.models.configuration import read_config
from midus.models.fitting import make_meta_model
from midus.models.sources import resolve_source
from midus.training.arguments import make_arguments
from midus.training.controls import apply_control
from midus.training.freezing import choose_trainable, count_trainable
from midus.training.optim import groups_of, is_relative, schedule_of
from midus.training.optimizer_options import PartOptions
from midus.training.options import TrainOptions
from midus.training.starting import planned_config, target_count


def describe_run(options: TrainOptions, base_config: Any = None) -> dict[str, Any]:
    """Parameter groups, step and token counts.

    Args:
        options: The run, the optimizer's options resolved.
        base_config: Config of ``options.model`` where it is known already.
    """
    config = planned_config(options, base_config)
    if options.control != "none":
        base = base_config or read_config(resolve_source(options.model, config_only=True))
        model = apply_control(make_meta_model(base), options.control, target_count(config))
    else:
        model = make_meta_model(config)
        choose_trainable(model, options.stage, options.trainable)
    arguments = make_arguments(
        options, has_held_out=bool(options.data.held_out or options.data.eval_sources)
    )
    length = options.data.seq_len if options.stage == "cpt" else options.max_length
    tokens = options.batch_size * length
    groups = groups_of(model, options.optimizer.absolute(1.0, _steps(options, arguments, tokens)))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": count_trainable(model),
        "groups": [
            {
                "name": group["name"],
                "tensors": len(group["params"]),
                "parameters": sum(p.numel() for p in group["params"]),
                "lr": group["lr"],
                "is_muon": group.get("muon", False),
                "is_relative": is_relative(group["name"], options.optimizer),
                "is_by_stream": options.optimizer.parts.get(group["name"], PartOptions()).by_stream,
                "rate": schedule_of(
                    group["name"],
                    options.optimizer.warmup_ratio,
                    options.optimizer.schedule,
                    options.optimizer.parts,
                )[0],
                "weight_decay": group["weight_decay"],
            }
            for group in groups
        ],
        "batch_size": options.batch_size,
        "tokens_a_step": tokens,
        "max_steps": arguments.max_steps,
        "length": _length(options, arguments, tokens),
    }


def _steps(options: TrainOptions, arguments: Any, tokens_a_step: int) -> int | None:
    """As many as there are at most, or None where only the data tells."""
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    if options.stage == "sft" or not options.data.max_tokens:
        return None
    return max(1, int(arguments.num_train_epochs * options.data.max_tokens // tokens_a_step))


def _length(options: TrainOptions, arguments: Any, tokens_a_step: int) -> str:
    steps = _steps(options, arguments, tokens_a_step)
    if steps is not None and arguments.max_steps > 0:
        return f"{steps:,} steps, at most {steps * tokens_a_step:,} tokens"
    count = arguments.num_train_epochs
    epochs = f"{count:g} epoch{'' if count == 1 else 's'}"
    if steps is not None:
        return f"{epochs}, {steps:,} steps or fewer"
    return f"{epochs}; the steps are counted when the data is read"

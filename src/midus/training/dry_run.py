"""What a run would do, told from configs alone: no weights, no data."""

from typing import Any

from midus.models.configuration import read_config
from midus.models.fitting import make_meta_model
from midus.models.sources import resolve_source
from midus.training.arguments import make_arguments
from midus.training.controls import apply_control
from midus.training.freezing import choose_trainable, count_trainable
from midus.training.optim import groups_of, is_relative, schedule_of
from midus.training.options import PartOptions, TrainOptions
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
    groups = groups_of(model, options.optimizer.absolute(1.0))
    arguments = make_arguments(
        options, has_held_out=bool(options.data.held_out or options.data.eval_sources)
    )
    length = options.data.seq_len if options.stage == "cpt" else options.max_length
    tokens = options.batch_size * length
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


def _length(options: TrainOptions, arguments: Any, tokens_a_step: int) -> str:
    if arguments.max_steps > 0:
        total = arguments.max_steps * tokens_a_step
        return f"{arguments.max_steps:,} steps, at most {total:,} tokens"
    count = arguments.num_train_epochs
    epochs = f"{count:g} epoch{'' if count == 1 else 's'}"
    if options.data.max_tokens:
        steps = int(arguments.num_train_epochs * options.data.max_tokens // tokens_a_step)
        return f"{epochs}, {steps:,} steps or fewer"
    return f"{epochs}; the steps are counted when the data is read"

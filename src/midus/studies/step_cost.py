"""What a training step costs: trials that agree in it need one timing."""

from typing import Any

from midus.studies.trials import hash_facts
from midus.training.optimizer_options import PartOptions
from midus.training.options import TrainOptions
from midus.upscaling.methods import METHODS

# What no step takes longer for. Names of places, chance, and what weights start from:
_FREE = ("model", "output", "seed", "key_start", "data")
# numbers of the optimizer, whose kind and groups do count:
_FREE_OPTIMIZER = (
    *(
        "recipe",
        "lr",
        "relative_lr",
        "for_steps",
        "steps_power",
        "memory_lr",
        "weight_decay",
        "adam_beta2",
    ),
    *("warmup_ratio", "schedule", "decay_ratio"),
)
# and arguments of the trainer: gradients are clipped whatever the norm is.
_FREE_ARGUMENTS = ("max_steps", "max_grad_norm", "adam_beta1", "adam_epsilon")


def step_cost(options: TrainOptions, base_config: Any) -> str:
    """A hash of all that may decide how long a step takes, on one device.

    Args:
        options: Of a trial.
        base_config: Config of the base, which all trials have.
    """
    facts = _without(options.to_dict(), _FREE)
    facts["seq_len"] = options.data.seq_len
    if options.upscale is not None:
        method = METHODS[options.upscale.method]
        if method.inserts == "copy" and options.control == "none":
            # Which weights the blocks start from costs nothing; where they stand does.
            plan = method.make_plan(options.upscale, base_config.num_hidden_layers)
            kinds = getattr(base_config, "layer_types", None)  # a window, or all tokens
            facts["upscale"] = {
                "copies": plan.positions,
                "kinds": kinds and [kinds[source] for source in plan.sources],
                "trains": method.trains,
            }
        else:
            facts["upscale"] = _without(facts["upscale"], ("seed",))
    facts["trainer"] = _without(facts["trainer"], _FREE_ARGUMENTS)
    # A part is a group of the optimizer, or one a block, and with a norm of its own clipped apart.
    parts = options.optimizer.parts.items()
    facts["optimizer"] = _without(facts["optimizer"], _FREE_OPTIMIZER) | {
        "parts": {name: _part_cost(own) for name, own in parts}
    }
    return hash_facts(facts)


def _part_cost(own: PartOptions) -> list[bool]:
    return [own.max_grad_norm is not None, own.by_stream]


def _without(facts: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in names}

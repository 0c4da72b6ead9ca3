"""The up-scaling methods by name, each one small file, and what is decided before one runs."""

from dataclasses import fields
from typing import Any

import torch

from midus.config import MemoryConfig, UpscaleConfig
from midus.errors import MidusError
from midus.models.block import MemoryBlock
from midus.models.configuration import make_deeper_config, make_upscaled_config
from midus.models.families import find_family, is_upscaled
from midus.models.untrusted import MAX_BLOCKS
from midus.upscaling import (
    avg_deus,
    base,
    gradual_stack,
    lesa,
    llama_pro,
    midus,
    opt_deus,
    solar,
    stack,
)
from midus.upscaling.method import Method
from midus.upscaling.plan import StackPlan

METHODS: dict[str, Method] = {
    "midus": midus.METHOD,
    "llama_pro": llama_pro.METHOD,
    "opt_deus": opt_deus.METHOD,
    "avg_deus": avg_deus.METHOD,
    "lesa": lesa.METHOD,
    "solar": solar.METHOD,
    "stack": stack.METHOD,
    "gradual_stack": gradual_stack.METHOD,
    "base": base.METHOD,
}


# Which method the options that begin so belong to.
_OWNERS = {"memory": "midus", "ot": "opt_deus", "lesa": "lesa"}


def find_method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise MidusError(f"method={name!r} is unknown; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def plan_upscaling(
    base_config: Any, config: UpscaleConfig, base_model: dict[str, Any]
) -> tuple[StackPlan, Any]:
    """The new stack and the new model's config, with everything checked that can be."""
    method = find_method(config.method)
    if is_upscaled(base_config.model_type):
        raise MidusError(
            "the base already has memory blocks; up-scale its own base with more blocks instead"
        )
    find_family(base_config.model_type)
    _refuse_unused_options(config, method)
    if getattr(base_config, "quantization_config", None):
        raise MidusError(
            "the base is quantized, and a quantized checkpoint cannot be grown; "
            "up-scale the unquantized one"
        )
    plan = method.make_plan(config, base_config.num_hidden_layers)
    if len(plan.sources) > MAX_BLOCKS:
        raise MidusError(
            f"the grown model would have {len(plan.sources):,} blocks, and checkpoints of more "
            f"than {MAX_BLOCKS:,} are refused; insert fewer"
        )
    placement = None if config.positions else config.placement or method.default_placement
    if method.inserts != "memory":
        record = {
            "method": method.name,
            "memory": None,
            "placement": placement,
            "seed": config.seed,
            "positions": plan.positions,
            "anchors": plan.anchors,
            "trainable": method.trains,
            "is_delta": False,
            "base_model": base_model,
        }
        return plan, make_deeper_config(base_config, plan.sources, record)
    upscaling = {"method": method.name, "placement": placement, "seed": config.seed}
    new_config = make_upscaled_config(
        base_config, plan.sources, plan.positions, config.memory, upscaling, base_model
    )
    with torch.device("meta"):
        MemoryBlock(new_config, plan.positions[0])  # refuses shapes that the layer cannot have
    return plan, new_config


def _refuse_unused_options(config: UpscaleConfig, method: Method) -> None:
    """Refuses options of another method, which would be ignored."""
    default = UpscaleConfig()
    for field in fields(config):
        owner = _OWNERS.get(field.name.split("_")[0])
        if owner not in (None, method.name) and getattr(config, field.name) != getattr(
            default, field.name
        ):
            raise MidusError(
                f"{field.name} is an option of method {owner!r}; leave it out for {method.name!r}"
            )


def remarks(memory: MemoryConfig) -> list[str]:
    """What a user should know about settings that are allowed but surprising."""
    if memory.top_k == 1 and memory.kind != "ultramem":
        constant = "top_k=1: the softmax over one slot is constant, so "
        if memory.bypass in ("attention", "both", "joined"):
            return [
                f"{constant}the memory's keys receive no gradient; q/k/v of the memory blocks "
                "train through the bypass alone"
            ]
        rest = "values, head projections and the bypass"
        if memory.bypass == "none":
            rest = "values and head projections"
        return [
            f"{constant}keys and q/k/v of the memory blocks receive no gradient; only {rest} will "
            "train"
        ]
    return []

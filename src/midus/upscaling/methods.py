"""The up-scaling methods by name, each one small file, and what a method decides first."""

from typing import Any, Protocol

import torch

from midus.config import MemoryConfig, UpscaleConfig
from midus.errors import MidusError
from midus.models.block import MemoryBlock
from midus.models.configuration import make_upscaled_config
from midus.models.families import find_family, is_upscaled
from midus.upscaling import midus
from midus.upscaling.plan import StackPlan


class Method(Protocol):
    """What a method's file offers."""

    def make_plan(self, config: UpscaleConfig, num_base_layers: int) -> StackPlan:
        """The new stack for a base of that depth."""
        ...


METHODS: dict[str, Method] = {"midus": midus}


def plan_upscaling(
    base_config: Any, config: UpscaleConfig, base_model: dict[str, Any]
) -> tuple[StackPlan, Any]:
    """The new stack and the new model's config, with everything checked that can be."""
    if config.method not in METHODS:
        raise MidusError(f"method={config.method!r} is unknown; choose one of {', '.join(METHODS)}")
    if is_upscaled(base_config.model_type):
        raise MidusError(
            "the base already has memory blocks; up-scale its own base with more blocks instead"
        )
    find_family(base_config.model_type)
    if getattr(base_config, "quantization_config", None):
        raise MidusError(
            "the base is quantized, and a quantized checkpoint cannot be grown; "
            "up-scale the unquantized one"
        )
    plan = METHODS[config.method].make_plan(config, base_config.num_hidden_layers)
    new_config = make_upscaled_config(
        base_config,
        plan.sources,
        plan.positions,
        config.memory,
        upscaling={
            "method": config.method,
            "placement": None if config.positions else config.placement or "distributed",
            "seed": config.seed,
        },
        base_model=base_model,
    )
    with torch.device("meta"):
        MemoryBlock(new_config, plan.positions[0])  # refuses shapes that the layer cannot have
    return plan, new_config


def remarks(memory: MemoryConfig) -> list[str]:
    """What a user should know about settings that are allowed but surprising."""
    if memory.top_k == 1:
        return [
            "top_k=1: the softmax over one slot is constant, so keys and q/k/v of the memory "
            "blocks receive no gradient; only values and head projections will train"
        ]
    return []

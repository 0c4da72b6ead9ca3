"""Which parts of a grown model LoRA adapts, in PEFT's words.

PEFT finds linear layers by the names of modules. The projections of memory layers, W_h of Eq. 5
above all, are parameters without a linear layer of their own, which PEFT takes by another list.
"""

from typing import Any

from torch import nn

from midus.models.block import MemoryBlock
from midus.models.checkpoint import full_name, split_block_name
from midus.models.record import inserted_positions
from midus.models.wrapped import bare

# Projections of memory layers, as they end in a memory block; tables and keys are no projections.
_PROJECTIONS = (
    "query_proj.weight",
    "values.value_proj",
    "memory_output_proj.weight",
    "bypass.weight",
)


def lora_targets(model: Any, inserted_only: bool = False) -> dict[str, list[str]]:
    """Every projection of a grown model, as ``peft.LoraConfig(**lora_targets(model))`` takes them.

    Args:
        model: A model of a supported family, with or without memory blocks.
        inserted_only: Leave the blocks of the base as they are.
    """
    model = bare(model)
    inserted = set(inserted_positions(model.config))
    modules: set[str] = set()
    parameters: set[str] = set()
    for name, module in model.named_modules():
        place = split_block_name(full_name(name))
        if place is not None and isinstance(module, nn.Linear):
            if not inserted_only:
                modules.add(name.rpartition(".")[2])
            elif place[0] in inserted:
                modules.add(name)
        if isinstance(module, MemoryBlock):
            parameters.update(
                own for own, _ in module.named_parameters() if own.endswith(_PROJECTIONS)
            )
    targets = {"target_modules": sorted(modules)}
    return {**targets, "target_parameters": sorted(parameters)} if parameters else targets

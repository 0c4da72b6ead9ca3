"""What a model is or would become, counted on the meta device: no weights are read."""

from pathlib import Path
from typing import Any

import torch

from midus.config import UpscaleConfig
from midus.models.block import MemoryBlock
from midus.models.checkpoint import is_inserted
from midus.models.configuration import read_config
from midus.models.families import PREFIX, is_upscaled
from midus.models.fitting import make_meta_model
from midus.models.record import num_base_layers, record_of
from midus.models.shapes import SHAPES, shape_config
from midus.models.sources import resolve_source
from midus.upscaling.methods import plan_upscaling
from midus.upscaling.plan import Kind, PlannedBlock, StackPlan


def describe(config: Any, upscale_config: UpscaleConfig | None = None) -> dict[str, Any]:
    """The facts of a grown model, or of what a base becomes with ``upscale_config``."""
    if not record_of(config):
        _, config = plan_upscaling(config, upscale_config or UpscaleConfig(), {})
    record = record_of(config)
    total, inserted = count_parameters(config)
    trainable = inserted if record["trainable"] == "inserted" else total
    return {
        "family": config.model_type.removeprefix(PREFIX),
        "method": record["method"],
        "memory": record["memory"],
        "num_base_layers": num_base_layers(config),
        "num_inserted": len(record["positions"]),
        "num_hidden_layers": config.num_hidden_layers,
        "anchors": record["anchors"],
        "positions": record["positions"],
        "params": {"base": total - inserted, "trainable": trainable, "total": total},
        "slots": _count_slots(config),
    }


def plan_of(config: Any) -> StackPlan:
    """The stack of a grown model, read back from its record."""
    record = record_of(config)
    inserted = dict(zip(record["positions"], record["anchors"], strict=True))
    kind: Kind = "memory" if is_upscaled(config.model_type) else "copy"
    base = iter(range(config.num_hidden_layers))
    return StackPlan(
        tuple(
            PlannedBlock(kind, inserted[i]) if i in inserted else PlannedBlock("base", next(base))
            for i in range(config.num_hidden_layers)
        )
    )


def count_parameters(config: Any) -> tuple[int, int]:
    """All parameters of a grown model, and those of its inserted blocks."""
    total = inserted = 0
    for name, parameter in make_meta_model(config).named_parameters():  # tied ones come once
        total += parameter.numel()
        inserted += parameter.numel() if is_inserted(name, config) else 0
    return total, inserted


def _count_slots(config: Any) -> int:
    """Slots that all heads of all memory blocks can address."""
    if not is_upscaled(config.model_type):
        return 0
    with torch.device("meta"):
        memory = MemoryBlock(config, config.memory_positions[0]).memory
    return int(len(config.memory_positions) * memory.num_heads * memory.num_slots)


def target_config(target: str) -> Any:
    """The config of a checkpoint folder, a hub id or a built-in shape; no weights are fetched."""
    if target in SHAPES and not Path(target).exists():
        return shape_config(target)
    return read_config(resolve_source(target, config_only=True))

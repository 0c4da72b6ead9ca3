"""What a model is or would become, counted on the meta device: no weights are read."""

from pathlib import Path
from typing import Any

from midus.config import UpscaleConfig
from midus.models.checkpoint import is_inserted
from midus.models.configuration import read_config
from midus.models.families import PREFIX, is_upscaled
from midus.models.fitting import make_meta_model
from midus.models.shapes import SHAPES, shape_config
from midus.models.sources import resolve_source
from midus.upscaling.methods import plan_upscaling
from midus.upscaling.placement import anchors_of
from midus.upscaling.plan import StackPlan


def describe(config: Any, upscale_config: UpscaleConfig | None = None) -> dict[str, Any]:
    """The facts of an up-scaled model, or of what a base becomes with ``upscale_config``."""
    if not is_upscaled(config.model_type):
        _, config = plan_upscaling(config, upscale_config or UpscaleConfig(), {})
    total, trainable = count_parameters(config)
    plan = plan_of(config)
    memory = config.memory_config
    return {
        "family": config.model_type.removeprefix(PREFIX),
        "method": config.upscaling.get("method", "midus"),
        "memory": memory.kind,
        "num_base_layers": config.num_base_layers,
        "num_inserted": len(plan.positions),
        "num_hidden_layers": config.num_hidden_layers,
        "anchors": plan.anchors,
        "positions": plan.positions,
        "params": {"base": total - trainable, "trainable": trainable, "total": total},
        "slots": len(plan.positions) * config.num_attention_heads * memory.num_slots,
    }


def plan_of(config: Any) -> StackPlan:
    """The stack of an up-scaled model, read back from its config."""
    anchors = anchors_of(config.memory_positions, config.num_base_layers, "before")
    return StackPlan.interleave(config.num_base_layers, anchors, "before", "memory")


def count_parameters(config: Any) -> tuple[int, int]:
    """All parameters of an up-scaled model, and those of its inserted blocks."""
    total = trainable = 0
    for name, parameter in make_meta_model(config).named_parameters():  # tied ones come once
        total += parameter.numel()
        trainable += parameter.numel() if is_inserted(name, config) else 0
    return total, trainable


def target_config(target: str) -> Any:
    """The config of a checkpoint folder, a hub id or a built-in shape; no weights are fetched."""
    if target in SHAPES and not Path(target).exists():
        return shape_config(target)
    return read_config(resolve_source(target, config_only=True))

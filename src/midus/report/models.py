"""What a model is, from its config alone: its stack and parameters, as `midus inspect` has them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.models.families import is_upscaled
from midus.models.identity import model_id
from midus.models.record import base_of, record_of
from midus.models.sources import EMBEDDED, resolve_source
from midus.upscaling.inspect import count_parameters, describe, plan_of, target_config
from midus.upscaling.plan import PlannedBlock


@dataclass(frozen=True)
class Model:
    """A base or a grown model."""

    source: str
    facts: dict[str, Any]
    """As `midus inspect --json` prints them; of a base, without method and inserted blocks."""
    blocks: list[PlannedBlock]
    memory: dict[str, Any]
    """Options of the memory layers; empty where there are none."""
    base: str | None
    """The base a grown model was made from."""


def read_model(source: str) -> Model:
    """Reads the config of a folder, hub id or ``smollm2-135m``; no weights."""
    config = target_config(source)
    if not record_of(config):
        return _plain_model(source, config)
    has_memory = is_upscaled(config.model_type)
    return Model(
        source=source,
        facts=describe(config),
        blocks=list(plan_of(config).blocks),
        memory=config.memory_config.to_dict() if has_memory else {},
        base=base_of(config).get("id"),
    )


def _plain_model(source: str, config: Any) -> Model:
    total, _ = count_parameters(config)
    depth = config.num_hidden_layers
    facts = {
        "family": config.model_type,
        "method": None,
        "memory": None,
        "num_base_layers": depth,
        "num_inserted": 0,
        "num_hidden_layers": depth,
        "anchors": [],
        "positions": [],
        "params": {"base": total, "trainable": total, "total": total},
        "slots": 0,
    }
    return Model(source, facts, [PlannedBlock("base", i) for i in range(depth)], {}, None)


def local_id(source: str) -> str | None:
    """The id of a model whose weights are on this machine; nothing is fetched for it."""
    place = Path(source).expanduser()
    if place.exists() or source == EMBEDDED:
        folder = resolve_source(source)
    else:
        try:
            folder = resolve_source(source, local_files_only=True)
        except MidusError:
            return None
    return model_id(folder) if any(folder.glob("*.safetensors")) else None

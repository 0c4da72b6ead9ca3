"""What a grown model knows of how it was made, whatever its class.

Models with memory blocks hold it in the fields of their config; copied-block models are plain
models of their family, whose config carries it as the attribute ``midus``. Every checkpoint has it
as `midus.json` beside config.json too, so that training needs no flags.
"""

import json
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.models.families import is_upscaled
from midus.models.untrusted import check_base_model, check_making, is_whole, read_json, shown
from midus.models.wrapped import bare

RECORD_NAME = "midus.json"


def record_of(config: Any) -> dict[str, Any]:
    """Method, positions, trainable set and base of a grown model; empty for any other."""
    if not is_upscaled(config.model_type):
        return dict(getattr(config, "midus", None) or {})
    positions = list(config.memory_positions)
    return {
        "method": config.upscaling.get("method", "midus"),
        "memory": config.memory.get("kind", "hml"),
        "placement": config.upscaling.get("placement"),
        "seed": config.upscaling.get("seed"),
        "positions": positions,
        "anchors": [position - j for j, position in enumerate(positions)],
        "trainable": "inserted",
        "is_delta": config.is_delta,
        "base_model": config.base_model,
    }


def inserted_positions(config: Any) -> list[int]:
    """Final indices of the inserted blocks."""
    return list(record_of(config).get("positions", []))


def num_base_layers(config: Any) -> int:
    """Blocks of the base a model has grown from, or its own if it has not."""
    return int(config.num_hidden_layers) - len(inserted_positions(config))


def is_delta(config: Any) -> bool:
    """Whether the checkpoint holds the inserted tensors only."""
    return bool(record_of(config).get("is_delta"))


def base_of(config: Any) -> dict[str, Any]:
    """Id, revision, fingerprint and licence of the base, as far as they are known."""
    return dict(record_of(config).get("base_model") or {})


def update_record(config: Any, **values: Any) -> None:
    """Sets ``is_delta`` or ``base_model`` where this kind of config keeps them."""
    if is_upscaled(config.model_type):
        for name, value in values.items():
            setattr(config, name, value)
    else:
        config.midus = {**record_of(config), **values}


def set_trainable(model: Any, trainable: str | None = None) -> None:
    """Lets exactly the parameters train that the model's method trains.

    Args:
        model: A grown model.
        trainable: ``inserted`` or ``all``, whatever the method says.
    """
    from midus.models.checkpoint import is_inserted

    model = bare(model)
    if trainable not in (None, "inserted", "all"):
        raise MidusError(f"trainable={trainable!r} is unknown; choose one of inserted, all")
    everything = (trainable or record_of(model.config).get("trainable")) != "inserted"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(everything or is_inserted(name, model.config))


def attach_record(config: Any, folder: Path) -> None:
    """Gives a plain config the record of its folder, and refuses one that makes no sense."""
    path = folder / RECORD_NAME
    if getattr(config, "midus", None) is None and path.is_file():
        try:
            config.midus = read_json(path)
        except MidusError:
            raise
        except (OSError, ValueError) as error:
            raise MidusError(f"{path} cannot be read ({shown(error)}); fetch it again") from error
    record = getattr(config, "midus", None)
    if record is None:
        return
    depth = config.num_hidden_layers
    whole = isinstance(record, dict) and {"method", "trainable"} <= record.keys()
    for name in ("positions", "anchors"):
        indices = record.get(name) if whole else None
        whole = isinstance(indices, list) and all(is_whole(i, 0, depth - 1) for i in indices)
    if (
        not whole
        or len(record["positions"]) != len(record["anchors"])
        or record["positions"] != sorted(set(record["positions"]))
        or not isinstance(record.get("is_delta", False), bool)
        or not all(isinstance(record[name], str) for name in ("method", "trainable"))
    ):
        raise MidusError(
            f"the midus record of {folder} does not describe a model of {depth} blocks; "
            "fetch the checkpoint again"
        )
    check_base_model(record.get("base_model"))
    check_making(record)
    record.setdefault("memory", None)


def write_record(folder: Path, config: Any) -> None:
    """Writes `midus.json`."""
    (folder / RECORD_NAME).write_text(json.dumps(record_of(config), indent=2) + "\n")

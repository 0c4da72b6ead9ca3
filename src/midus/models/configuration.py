"""Midus<Family>Config: the family's own config plus where memory blocks stand and what they are.

`num_hidden_layers` is the final depth, and `layer_types`, where a family has it, covers the final
stack: the KV cache and the attention masks depend on both.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midus.config import MemoryConfig
from midus.errors import MidusError
from midus.models.families import FAMILIES, PREFIX, Family, find_family, is_upscaled
from midus.models.record import attach_record
from midus.models.untrusted import (
    check_base_model,
    check_making,
    check_positions,
    is_whole,
    read_json,
    reason_of,
    refuse_odd_sizes,
    refuse_redirections,
    shown,
)

FORMAT_VERSION = 1

# What a base's config.json says about itself, not about its architecture.
_NOT_INHERITED = (
    "model_type",
    "architectures",
    "auto_map",
    "transformers_version",
    "quantization_config",
    "_name_or_path",
    "name_or_path",
    "midus",
)


@dataclass(kw_only=True)
class MidusConfigMixin:
    """The fields an up-scaled model's config has on top of its family's."""

    memory_positions: list[int] = field(default_factory=list)
    """Final-stack indices of the memory blocks, ascending."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Options of the memory layers, as in `midus.MemoryConfig`."""
    upscaling: dict[str, Any] = field(default_factory=dict)
    """How the blocks were placed: method, placement, seed."""
    base_model: dict[str, Any] = field(default_factory=dict)
    """The base: its id, revision and fingerprint."""
    is_delta: bool = False
    """Whether the folder holds the inserted tensors only."""
    midus_format: int = FORMAT_VERSION
    """Version of this layout."""

    def __post_init__(self, **kwargs: Any) -> None:
        if not is_whole(self.midus_format, 1, FORMAT_VERSION):
            raise MidusError(
                f"this checkpoint has midus format {shown(self.midus_format)}, this midus reads "
                f"up to {FORMAT_VERSION}; upgrade midus"
            )
        for name in ("memory", "upscaling"):
            if not isinstance(getattr(self, name), dict):
                raise MidusError(
                    f"{name}={shown(repr(getattr(self, name)))} in the config must be a dict; "
                    "fetch the checkpoint again"
                )
        if not isinstance(self.is_delta, bool):
            raise MidusError(
                f"is_delta={shown(repr(self.is_delta))} in the config must be true or false; "
                "fetch the checkpoint again"
            )
        check_positions(self.memory_positions, self.num_hidden_layers)  # type: ignore[attr-defined]
        check_base_model(self.base_model)
        check_making(self.upscaling)
        try:
            MemoryConfig.from_dict(self.memory)
        except MidusError as error:
            raise MidusError(f"the memory of the config cannot be: {shown(error, 500)}") from error
        super().__post_init__(**kwargs)  # type: ignore[misc]  # the family's config class

    @property
    def memory_config(self) -> MemoryConfig:
        return MemoryConfig.from_dict(self.memory)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: checkpoints carry a stub that imports midus, never a copy of its source."""


def _make_config_class(family: Family) -> Any:
    name = f"Midus{family.text_prefix or family.prefix}Config"
    plan = family.config_class.base_model_tp_plan
    body = {
        "__doc__": f"{family.config_class.__name__} with memory blocks.",
        "__module__": __name__,
        "__annotations__": {},
        "model_type": PREFIX + family.model_type,
        # Heads are shared out as in the base's blocks; every rank has the whole memory, so the
        # heads come together before it, in the way the output projection would take them.
        "base_model_tp_plan": {
            **plan,
            "layers.*.head_outputs": plan["layers.*.self_attn.o_proj"],
        },
    }
    return type(name, (MidusConfigMixin, family.config_class), body)


CONFIG_CLASSES: dict[str, Any] = {
    model_type: _make_config_class(family) for model_type, family in FAMILIES.items()
}
globals().update({cls.__name__: cls for cls in CONFIG_CLASSES.values()})


def make_upscaled_config(
    base_config: Any,
    source_layers: list[int],
    memory_positions: list[int],
    memory: MemoryConfig,
    upscaling: dict[str, Any],
    base_model: dict[str, Any],
) -> Any:
    """The config of the grown model.

    Args:
        base_config: The base's config.
        source_layers: For each final index, the base block it is, or a memory block's anchor.
        memory_positions: Final indices of the memory blocks.
        memory: Options of the memory layers.
        upscaling: How the blocks were placed.
        base_model: Where the base came from.
    """
    inherited = {k: v for k, v in base_config.to_dict().items() if k not in _NOT_INHERITED}
    inherited["num_hidden_layers"] = len(source_layers)
    if inherited.get("layer_types"):
        inherited["layer_types"] = [inherited["layer_types"][i] for i in source_layers]
    return CONFIG_CLASSES[base_config.model_type](
        **inherited,
        memory_positions=list(memory_positions),
        memory=memory.to_dict(),
        upscaling=upscaling,
        base_model=base_model,
    )


def make_deeper_config(base_config: Any, source_layers: list[int], record: dict[str, Any]) -> Any:
    """The config of a plain model of the base's family with more blocks.

    Args:
        base_config: The base's config.
        source_layers: For each final index, the base block it is or is made from.
        record: What `midus.models.record` keeps of how the model was made.
    """
    config = copy.deepcopy(base_config)
    config.num_hidden_layers = len(source_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [base_config.layer_types[i] for i in source_layers]
    config.name_or_path = ""
    if hasattr(config, "auto_map"):
        del config.auto_map  # a base's own code is not copied
    config.midus = record
    return config


def read_config(folder: Path) -> Any:
    """The config of a model folder."""
    from transformers import AutoConfig

    path = folder / "config.json"
    try:
        values = read_json(path)
        model_type = values.get("model_type")
    except MidusError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise MidusError(f"{path} cannot be read ({shown(error)})") from error
    if not isinstance(model_type, str):
        raise MidusError(
            f"{path} names no model_type (it says {shown(repr(model_type))}); "
            "give a Hugging Face model folder"
        )
    find_family(model_type)
    refuse_redirections(values, path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_odd_sizes(config, path)
        _refuse_odd_type(config, path)
        if not is_upscaled(model_type):
            attach_record(config, folder)
        _build_one_block(config)
        return config
    except MidusError:
        raise
    except Exception as error:
        # transformers has many ways to refuse a config; its last line says what is wrong.
        raise MidusError(f"{path} is not a usable config: {reason_of(error)}") from error


def _refuse_odd_type(config: Any, path: Path) -> None:
    import torch

    # transformers takes any attribute of torch for a type.
    dtype = config.dtype
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype is not None and not is_float:
        raise MidusError(
            f"{path} has dtype={shown(repr(dtype))}, where float32, bfloat16 or float16 belongs; "
            "fetch the checkpoint again"
        )


def _build_one_block(config: Any) -> None:
    """Builds the model's parts once each, without weights: a config that cannot be fails here."""
    import torch

    from midus.models.block import MemoryBlock

    family = find_family(config.model_type)
    probe = copy.deepcopy(config)
    with torch.device("meta"):
        if is_upscaled(config.model_type):
            if not config.memory_positions:
                raise MidusError(
                    "the config names no memory_positions, though its model_type is "
                    f"{config.model_type!r}; fetch the checkpoint again"
                )
            MemoryBlock(config, config.memory_positions[0])
        probe.num_hidden_layers = 1
        if getattr(probe, "layer_types", None):
            probe.layer_types = probe.layer_types[:1]
        family.causal_lm_class(probe)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

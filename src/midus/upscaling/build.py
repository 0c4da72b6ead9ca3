"""Grows a model that is in memory.

The new model shares the base's weights where the method leaves them frozen, so that only the new
blocks take memory and the base stays usable; a method that trains everything gets copies.
"""

import copy
import warnings
from typing import Any

import torch

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.models.checkpoint import base_positions, block_names, renumber, split_block_name
from midus.models.fitting import causal_lm_class
from midus.models.record import set_trainable
from midus.models.sources import source_id
from midus.models.wrapped import bare
from midus.upscaling.method import BaseBlocks, Growth, Track
from midus.upscaling.methods import find_method, plan_upscaling, remarks


def upscale(
    model: Any,
    config: UpscaleConfig | None = None,
    track: Track = lambda items, _: items,
) -> Any:
    """A deeper model; by default one that starts out computing exactly what ``model`` computes.

    Args:
        model: A loaded causal language model of a supported family.
        config: What to insert and where; the paper's settings by default.
        track: Wraps loops in a progress bar.

    Returns:
        A ``Midus<Family>ForCausalLM``, or for copied-block methods a deeper model of the base's own
        class, on the same devices and in the same types; what the method trains is trainable and
        the rest frozen.
    """
    config = config or UpscaleConfig()
    _refuse_unsuitable(model)
    plan, new_config = plan_upscaling(
        model.config,
        config,
        base_model={
            "id": source_id(model.config.name_or_path) if model.config.name_or_path else None,
            "revision": getattr(model.config, "_commit_hash", None),
        },
    )
    for remark in remarks(config.memory) if config.method == "midus" else []:
        warnings.warn(remark, stacklevel=2)
    new_config.tie_word_embeddings = model.lm_head.weight is model.get_input_embeddings().weight
    new_config._attn_implementation = model.config._attn_implementation
    new_config.dtype = model.dtype
    with torch.device("meta"):
        grown = causal_lm_class(new_config)(new_config)

    base_state = model.state_dict()
    positions = base_positions(new_config)
    method = find_method(config.method)
    state = {
        # Shared with the base, unless training would change the base's weights under its feet.
        renumber(name, positions): tensor.clone() if method.trains == "all" else tensor
        for name, tensor in base_state.items()
    }
    growth = Growth(
        BaseBlocks(block_names(base_state, len(positions)), lambda name: base_state[name].cpu()),
        plan,
        new_config,
        config,
        model.dtype,
        track,
    )
    for position, block in method.make_blocks(growth):
        device = base_state[f"model.layers.{plan.sources[position]}.self_attn.q_proj.weight"].device
        for name, tensor in block.items():
            state[f"model.layers.{position}.{name}"] = tensor.to(device)
    grown.load_state_dict(state, strict=True, assign=True)
    _share_buffers(model, grown)
    grown.tie_weights()
    grown.generation_config = copy.deepcopy(model.generation_config)
    grown.train(model.training)
    set_trainable(grown)
    return grown


def _refuse_unsuitable(model: Any) -> None:
    if bare(model) is not model:
        raise MidusError(
            f"the base is wrapped in {type(model).__name__}; up-scale the model itself, "
            "and wrap it then"
        )
    if not hasattr(model, "config") or not hasattr(model, "lm_head"):
        raise MidusError(
            f"{type(model).__name__} is not a causal language model of transformers; "
            "load one with AutoModelForCausalLM"
        )
    places = set(getattr(model, "hf_device_map", {}).values())
    if len(places) > 1:
        raise MidusError(
            f"the base is spread over {len(places)} devices; load it on one, or grow its "
            "checkpoint by midus.upscale_checkpoint and spread the grown model"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise MidusError(
            "the base is quantized, and up-scaling it in memory is not supported; "
            "up-scale the unquantized checkpoint"
        )
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise MidusError("some of the base's weights are offloaded; load the base without offload")


def _share_buffers(model: Any, grown: Any) -> None:
    """Gives the grown model the base's rotary tables and the like, which no state dict holds."""
    for name, buffer in model.named_buffers():
        module_name, _, leaf = name.rpartition(".")
        owner = grown.get_submodule(module_name) if split_block_name(name) is None else None
        if owner is not None and getattr(owner, leaf).is_meta:
            owner.register_buffer(leaf, buffer.clone(), persistent=False)

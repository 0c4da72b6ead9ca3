"""Grows a model that is in memory.

The new model shares the base's weights (the base stays usable); only the anchors' attention is
copied. Base weights are frozen in the new model.
"""

import copy
import warnings
from typing import Any

import torch

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.models.checkpoint import base_positions, renumber, split_block_name
from midus.models.modeling import CAUSAL_LM_CLASSES
from midus.models.sources import source_id
from midus.upscaling.methods import plan_upscaling, remarks
from midus.upscaling.midus import make_block_tensors


def upscale(model: Any, config: UpscaleConfig | None = None) -> Any:
    """A deeper model that starts out computing exactly what ``model`` computes.

    Args:
        model: A loaded causal language model of a supported family.
        config: What to insert and where; the paper's settings by default.

    Returns:
        A ``Midus<Family>ForCausalLM`` on the same devices and in the same types, its inserted
        blocks trainable and the rest frozen.
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
    for remark in remarks(config.memory):
        warnings.warn(remark, stacklevel=2)
    new_config.tie_word_embeddings = model.lm_head.weight is model.get_input_embeddings().weight
    new_config._attn_implementation = model.config._attn_implementation
    new_config.dtype = model.dtype
    with torch.device("meta"):
        grown = CAUSAL_LM_CLASSES[model.config.model_type](new_config)

    base_state = model.state_dict()
    positions = base_positions(new_config)
    state = {renumber(name, positions): tensor for name, tensor in base_state.items()}
    by_block: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in base_state.items():
        if (parts := split_block_name(name)) is not None:
            by_block.setdefault(parts[0], {})[parts[1]] = tensor
    for position, anchor in zip(plan.positions, plan.anchors, strict=True):
        anchor_tensors = by_block[anchor]
        device = anchor_tensors["self_attn.q_proj.weight"].device
        block = make_block_tensors(new_config, position, anchor_tensors, config.seed, model.dtype)
        for name, tensor in block.items():
            state[f"model.layers.{position}.{name}"] = tensor.to(device)
    grown.load_state_dict(state, strict=True, assign=True)
    _share_buffers(model, grown)
    grown.tie_weights()
    grown.generation_config = copy.deepcopy(model.generation_config)
    grown.train(model.training)
    grown.freeze_base()
    return grown


def _refuse_unsuitable(model: Any) -> None:
    if not hasattr(model, "config") or not hasattr(model, "lm_head"):
        raise MidusError(
            f"{type(model).__name__} is not a causal language model of transformers; "
            "load one with AutoModelForCausalLM"
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

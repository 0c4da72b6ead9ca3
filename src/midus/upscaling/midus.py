"""MIDUS: memory blocks before their anchors (paper, Section 4.1, Eq. 4).

Each block copies the attention of its anchor and the norm before it, and its memory starts at
zero values, so the grown model starts as the base.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from midus.config import UpscaleConfig
from midus.models.block import MemoryBlock, copied_from_anchor
from midus.models.checkpoint import split_block_name
from midus.upscaling.placement import anchors_of, place
from midus.upscaling.plan import StackPlan

DEFAULT_PLACEMENT = "distributed"


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """Memory blocks before the anchors of the placement or the given positions."""
    if config.positions is not None:
        anchors = anchors_of(config.positions, num_base_layers, "before")
    else:
        num_inserted = config.num_inserted or max(num_base_layers // 2, 1)
        anchors = place(config.placement or DEFAULT_PLACEMENT, num_base_layers, num_inserted)
    return StackPlan.interleave(num_base_layers, anchors, "before", "memory")


def make_block_tensors(
    config: Any, layer_idx: int, anchor: Mapping[str, Tensor], seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors one memory block starts with, by their names inside the block.

    Args:
        config: Config of the up-scaled model.
        layer_idx: Final index of the block.
        anchor: The anchor block's tensors, by their names inside that block.
        seed: Seed of the keys and head projections; each block has its own stream.
        dtype: Type of the memory's tensors; the copied ones keep theirs.
    """
    with torch.device("meta"):
        block = MemoryBlock(config, layer_idx)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed << 16) + layer_idx)
        for parent in (block.memory, block.memory_output_proj):
            for module in parent.modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is not None:
                    module.to_empty(device="cpu", recurse=False)
                    reset()
    tensors: dict[str, Tensor] = {}
    for name, tensor in block.state_dict().items():
        if copied_from_anchor(name):
            tensors[name] = anchor[name].clone()
        else:
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors


def copied_names(config: Any, anchor_names: Mapping[str, Any], anchor: int) -> dict[str, str]:
    """Full name by name inside the block, for the anchor's tensors that a memory block copies."""
    with torch.device("meta"):
        wanted = {name for name in MemoryBlock(config, 0).state_dict() if copied_from_anchor(name)}
    names: dict[str, str] = {}
    for full in anchor_names:
        parts = split_block_name(full)
        if parts is not None and parts[0] == anchor and parts[1] in wanted:
            names[parts[1]] = full
    return names

"""MIDUS: memory blocks before their anchors (paper, Section 4.1, Eq. 4).

Each block copies the attention of its anchor and the norm before it, and its memory starts at
zero values, so the grown model starts as the base.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from midus.config import UpscaleConfig
from midus.models.block import MemoryBlock, copied_from_anchor
from midus.upscaling.method import Growth, Method
from midus.upscaling.placement import choose_anchors
from midus.upscaling.plan import StackPlan

_PLACEMENT = "distributed"


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """Memory blocks before the anchors of the placement or the given positions."""
    anchors = choose_anchors(config, num_base_layers, _PLACEMENT, "before")
    return StackPlan.interleave(num_base_layers, anchors, "before", "memory")


def make_blocks(growth: Growth) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Memory blocks with their anchors' attention; only those tensors of the base are read."""
    for position, anchor in growth.track(growth.inserted(), "starting memory blocks"):
        wanted = [name for name in growth.base.names(anchor) if copied_from_anchor(name)]
        tensors = {name: growth.base.read(anchor, name).to(growth.dtype) for name in wanted}
        yield (
            position,
            make_block_tensors(growth.config, position, tensors, growth.options.seed, growth.dtype),
        )


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
        torch.default_generator.manual_seed((seed << 16) + layer_idx)
        for parent in (block.memory, block.memory_output_proj, block.bypass):
            for module in parent.modules() if parent is not None else ():
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


METHOD = Method(
    name="midus",
    summary="memory blocks before their anchors, started as the identity",
    paper="Kim et al., 2025",
    inserts="memory",
    preserves_function=True,
    trains="inserted",
    default_placement=_PLACEMENT,
    make_plan=make_plan,
    make_blocks=make_blocks,
)

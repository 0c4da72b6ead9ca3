"""Proof that a grown checkpoint computes what its base does, block by block.

The base blocks are the base's own tensors, and each inserted block alone returns its input bit for
bit; so the whole model is the base. Neither step needs a whole model in memory.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.models.block import MemoryBlock
from midus.models.families import find_family, is_upscaled
from midus.models.record import inserted_positions

_NUM_TOKENS = 16


def prove_identity(
    config: Any,
    block_tensors: Callable[[int], Mapping[str, Tensor]],
    track: Callable[[Iterable[int], str], Iterable[int]] = lambda items, _: items,
) -> int:
    """Runs every inserted block on random input and compares the output's bits with it.

    Args:
        config: Config of the up-scaled model.
        block_tensors: The tensors of the block at a final index, by their names in the block.
        track: Wraps the loop in a progress bar.

    Returns:
        The number of blocks shown to be the identity.
    """
    config = copy.copy(config)
    config._attn_implementation = "sdpa"
    family = find_family(config.model_type)
    block_class = MemoryBlock if is_upscaled(config.model_type) else family.block_class
    positions = inserted_positions(config)
    for position in track(positions, "checking inserted blocks"):
        tensors = block_tensors(position)
        with torch.device("meta"):
            block = block_class(config, position)
        block.load_state_dict(tensors, strict=True, assign=True)
        block.eval()
        generator = torch.Generator().manual_seed(position)
        dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
        hidden_states = torch.randn(1, _NUM_TOKENS, config.hidden_size, generator=generator).to(
            dtype
        )
        with torch.no_grad():
            output = block(
                hidden_states,
                attention_mask=None,
                position_embeddings=_rotary(config, hidden_states, position),
            )
        if not torch.equal(output.view(torch.uint8), hidden_states.view(torch.uint8)):
            raise MidusError(
                f"the inserted block at {position} does not return its input, so this is a trained "
                "or damaged checkpoint"
            )
    return len(positions)


def _rotary(config: Any, hidden_states: Tensor, position: int) -> Any:
    rotary = find_family(config.model_type).rotary_class(config)
    positions = torch.arange(hidden_states.shape[1]).unsqueeze(0)
    # Gemma 3 has one rotary table per layer type.
    if isinstance(getattr(rotary, "rope_type", None), dict):
        return rotary(hidden_states, positions, config.layer_types[position])
    return rotary(hidden_states, positions)

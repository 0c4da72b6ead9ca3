"""A model of a config with random weights, made on the device in seconds.

Times and memory do not depend on what the weights are, as long as nothing is zero that a trained
model has: tables of values, which start at zero, are filled.
"""

import copy
from typing import Any

import torch

from midus.memory.base import MemoryLayer
from midus.models.fitting import causal_lm_class

ATTENTION = "sdpa"
_TABLE_STD = 0.02


def make_random_model(
    config: Any, device: torch.device, dtype: torch.dtype, longest: int = 0, seed: int = 0
) -> Any:
    """The causal LM of a config, in evaluation mode, tied where its config ties.

    Args:
        config: Config of a base or a grown model; left as it is.
        device: Where the weights are made.
        dtype: Of all weights; rotary frequencies stay in float32.
        longest: Positions the model must reach; the shapes' configs name none.
        seed: Of the weights.
    """
    config = copy.deepcopy(config)
    positions = getattr(config, "max_position_embeddings", None) or 0
    config.max_position_embeddings = max(positions, longest)
    with torch.device("meta"):
        model = causal_lm_class(config)._from_config(
            config, dtype=dtype, attn_implementation=ATTENTION
        )
    model.to_empty(device=device)  # unties, and leaves buffers undefined: both mended below
    torch.manual_seed(seed)
    with torch.no_grad():
        model.initialize_weights()
        model.tie_weights()
        for module in model.modules():
            if isinstance(module, MemoryLayer):
                for table in module.keys_and_values():
                    if not table.any():
                        table.normal_(std=_TABLE_STD)
    # Generation runs to the length it is told, whatever a config says of stopping.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    return model.eval()

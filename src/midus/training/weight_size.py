"""How large a base's weights are, which is what `relative_lr` is a multiple of.

A step of Adam is as large as the rate, whatever the gradient is; whether that is much depends on
the weights. Between two bases they can differ tenfold, and a base whose matrices are multiplied
and norms divided by ten computes what it computed: only a rate that is multiplied as well trains
both alike.
"""

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from midus.errors import MidusError
from midus.models.record import inserted_positions
from midus.training.controls import causal_lm

# Of each matrix so many rows are read, spread over it.
_ROWS = 256


def weight_size(model: Any) -> float:
    """Median of the root mean squares of the matrices in the base's own blocks.

    Args:
        model: The base or what has grown from it, before it trains; 4 bits and LoRA are fine.
    """
    inner = causal_lm(model)
    inserted = set(inserted_positions(inner.config))
    sizes = [
        _root_mean_square(module.weight)
        for position, block in enumerate(inner.model.layers)
        if position not in inserted
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    ]
    if not sizes:
        raise MidusError(
            "relative_lr needs blocks of the base with linear layers, and this model has none; "
            "give lr instead"
        )
    return statistics.median(sizes)


@torch.no_grad()
def _root_mean_square(weight: Tensor) -> float:
    if (state := getattr(weight, "quant_state", None)) is not None:
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(weight.data, state)
    rows = weight[:: max(1, weight.shape[0] // _ROWS)].float()
    return rows.square().mean().sqrt().item()

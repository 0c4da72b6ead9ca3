"""A quantized base with inserted blocks as they were trained.

Quantizers of transformers replace every linear layer they are not told to leave. The inserted
blocks are few, and what was trained is in them, so loading tells every quantizer to leave them.
"""

import copy
from typing import Any

# What the quantizers' configs call the list of modules they leave alone.
_LISTS = ("llm_int8_skip_modules", "modules_to_not_convert")
# Where a block has its linear layers. Quantizers read the names as regular expressions that match
# a beginning: `model.layers.1` would be layers 10 to 19 too.
_PARTS = ("self_attn", "mlp")


def inserted_linears(positions: list[int], prefix: str = "model.") -> list[str]:
    """Names by which a quantizer leaves the blocks at these positions alone."""
    return [f"{prefix}layers.{position}.{part}" for position in positions for part in _PARTS]


def leave_inserted(quantization: Any, positions: list[int], prefix: str = "model.") -> Any:
    """A quantizer's config that leaves these blocks and the head alone; others come back as is.

    Args:
        quantization: What ``from_pretrained`` got as ``quantization_config``.
        positions: Final indices of the inserted blocks.
        prefix: What stands before ``layers.`` in the names of the model's modules.
    """
    name = next((name for name in _LISTS if hasattr(quantization, name)), None)
    if name is None:
        return quantization
    quantization = copy.deepcopy(quantization)
    # With no list of ours a quantizer would leave the head by itself.
    left = getattr(quantization, name)
    left = ["lm_head"] if left is None else left
    setattr(quantization, name, [*left, *inserted_linears(positions, prefix)])
    return quantization

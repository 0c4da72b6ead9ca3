"""The gate of a Llama FFN in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up

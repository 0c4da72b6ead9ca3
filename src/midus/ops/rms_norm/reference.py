"""The RMSNorm of a Llama block in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_readers: int = 1,
) -> tuple[Tensor, ...]:
    """``x = hidden + added``, then ``w x / sqrt(mean(x²) + eps)`` for each reader."""
    stream = hidden if added is None else hidden + added
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    # Rounded to the stream's type before it meets the weight, as transformers does.
    normed = weight * F.rms_norm(wide, wide.shape[-1:], eps=eps).to(stream.dtype)
    normed = normed if dtype is None else normed.to(dtype)
    return stream, *(normed,) * num_readers

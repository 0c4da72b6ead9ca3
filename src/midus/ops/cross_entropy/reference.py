"""Cross-entropy of rows of logits and its gradient, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The rows' summed loss; ``logits`` become its gradient."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide, targets, ignore_index=ignored, reduction="sum")
    grad = wide.softmax(-1)
    grad.scatter_add_(1, targets.clamp_min(0)[:, None], -torch.ones_like(grad[:, :1]))
    logits.copy_(grad * (targets != ignored)[:, None])
    return loss

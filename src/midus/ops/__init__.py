"""Functions on tensors behind the memory layers; no modules, no transformers.

Every op has a plain PyTorch reference, and those that cost most have Triton kernels too; which one
runs is decided in `dispatch.py`.
"""

from midus.ops.block_ops import (
    attend_token,
    cross_entropy_,
    gate_token,
    gated,
    linear_token,
    project_token,
    rms_norm,
    rotate_heads,
)
from midus.ops.memory_ops import (
    attend_and_read,
    headwise_memory,
    headwise_memory_cached,
    product_key_topk,
    weighted_gather,
)
from midus.ops.search_ops import linear_topk, tucker_topk

__all__ = [
    "attend_and_read",
    "attend_token",
    "cross_entropy_",
    "gate_token",
    "gated",
    "headwise_memory",
    "headwise_memory_cached",
    "linear_token",
    "linear_topk",
    "product_key_topk",
    "project_token",
    "rms_norm",
    "rotate_heads",
    "tucker_topk",
    "weighted_gather",
]

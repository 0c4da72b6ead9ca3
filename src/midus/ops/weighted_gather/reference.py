"""Weighted sum of table rows in plain PyTorch: ``out[p] = sum_k weights[p, k] * table[idx[p, k]]``.

Paper, Eq. 5 (left) and Appendix "Deduplicated Gradient Accumulation".
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_gather(values: Tensor, slot_idx: Tensor, weights: Tensor) -> Tensor:
    """Sums the rows of ``values`` that each query selected; arguments as `ops` has them."""
    dtype = torch.promote_types(torch.promote_types(weights.dtype, values.dtype), torch.float32)
    # F.embedding, not values[slot_idx]: the backward of advanced indexing is not reproducible.
    rows = F.embedding(slot_idx, values)  # [..., K, R]
    return (weights.to(dtype).unsqueeze(-1) * rows.to(dtype)).sum(dim=-2).to(values.dtype)

"""Weighted sum of table rows in plain PyTorch: ``out[p] = sum_k weights[p, k] * table[idx[p, k]]``.

Paper, Eq. 5 (left) and Appendix "Deduplicated Gradient Accumulation".
"""

import torch.nn.functional as F
from torch import Tensor


def weighted_gather(values: Tensor, slot_idx: Tensor, weights: Tensor) -> Tensor:
    """Sums the rows of ``values`` that each query selected.

    Args:
        values: ``[N, R]``.
        slot_idx: ``[..., K]`` row numbers.
        weights: ``[..., K]``; products and sums are done in this type.

    Returns:
        ``[..., R]`` in the type of ``values``.
    """
    # F.embedding, not values[slot_idx]: the backward of advanced indexing is not reproducible.
    rows = F.embedding(slot_idx, values)  # [..., K, R]
    return (weights.unsqueeze(-1) * rows.to(weights.dtype)).sum(dim=-2).to(values.dtype)

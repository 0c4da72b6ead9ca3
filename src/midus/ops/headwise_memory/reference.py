"""The head-wise memory layer in plain PyTorch: Top-k, softmax, weighted sum, projection.

Paper, Section 4.2, Eq. 5, and Appendix "Head-wise Value Caching". Shape letters: H heads, E query
width, n sub-keys, K top_k, N = n * n slots, R latent, O head output.
"""

import torch
from torch import Tensor

from midus.ops.product_key_topk.reference import product_key_topk
from midus.ops.weighted_gather.reference import weighted_gather


def headwise_memory(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    latent_values: Tensor,
    value_proj: Tensor,
    top_k: int,
    cartesian: bool = False,
) -> Tensor:
    """Every head's retrieved latent value through its own projection: ``[..., H, O]``."""
    slot_idx, scores = product_key_topk(queries, row_keys, col_keys, top_k, cartesian)
    latent = weighted_gather(latent_values, slot_idx, scores.softmax(dim=-1))  # [..., H, R]
    # Project after the weighted sum: one R x O product per head instead of K of them.
    return torch.einsum("...hr,hro->...ho", latent, value_proj)


def headwise_memory_cached(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    cartesian: bool = False,
) -> Tensor:
    """The same from values that are projected already, ``[H, N, O]``."""
    slot_idx, scores = product_key_topk(queries, row_keys, col_keys, top_k, cartesian)
    num_heads, num_slots, _ = value_cache.shape
    own = torch.arange(num_heads, device=slot_idx.device).unsqueeze(-1) * num_slots  # [H, 1]
    return weighted_gather(value_cache.flatten(0, 1), slot_idx + own, scores.softmax(dim=-1))

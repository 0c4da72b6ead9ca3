"""Top-k over one key per slot in plain PyTorch; the scores of all slots never exist at once.

Paper, Section 3, "Linear memory layer". Shape letters: H heads, E query width, N slots, K top_k.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores that may exist at a time, over all heads: 64 MB in float32.
_SCORES_AT_ONCE = 1 << 24


def linear_topk(queries: Tensor, keys: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Finds the ``top_k`` best slots of every head.

    The winners are chosen chunk by chunk without a graph; their scores are then computed again from
    their keys, so that the backward pass touches K keys per query and not N.

    Args:
        queries: ``[..., H, E]``.
        keys: ``[H, N, E]``.
        top_k: Slots to keep per head and query.

    Returns:
        Slot numbers and their scores, both ``[..., H, K]``, best first; scores in float32 or wider.
    """
    num_heads, num_slots, width = keys.shape
    dtype = torch.promote_types(queries.dtype, torch.float32)
    flat = queries.reshape(-1, num_heads, width)
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        wide_keys = keys.to(dtype)
        chunk = max(_SCORES_AT_ONCE // (num_heads * num_slots), 1)
        slot_idx = torch.cat(
            [
                torch.einsum("phe,hne->phn", piece.to(dtype), wide_keys).topk(top_k, dim=-1).indices
                for piece in flat.split(chunk)
            ]
        )  # [P, H, K]
    heads = torch.arange(num_heads, device=keys.device).unsqueeze(-1) * num_slots
    chosen = F.embedding(slot_idx + heads, keys.flatten(0, 1))  # [P, H, K, E]
    with torch.autocast(queries.device.type, enabled=False):
        scores = (flat.unsqueeze(-2).to(dtype) * chosen.to(dtype)).sum(dim=-1)  # [P, H, K]
    shape = (*queries.shape[:-1], top_k)
    return slot_idx.view(shape), scores.view(shape)

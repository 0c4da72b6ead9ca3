"""Rotary position embeddings in plain PyTorch, as the Llama family has them."""

import torch
from torch import Tensor


def rotate_heads(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns each pair ``(x[i], x[i + E/2])`` by its position's angle."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [B, T, 1, E]

    def rotate(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate(queries), rotate(keys)

"""One token through a memory block, in plain PyTorch: what the kernels beside this compute."""

import torch
import torch.nn.functional as F
from torch import Tensor

from midus.ops.headwise_memory.reference import headwise_memory_cached
from midus.ops.rotary.reference import rotate_heads


def project_token(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int | Tensor,
) -> Tensor:
    """Queries ``[1, H, E]`` of ONE token; key and value go to slot ``position``."""
    width = cos.shape[-1]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    normed = F.rms_norm(hidden.to(wide), (hidden.shape[-1],), norm_weight.to(wide), eps)
    queries, key, value = (
        F.linear(normed, weight.to(wide), None if bias is None else bias.to(wide))
        .to(hidden.dtype)
        .view(1, 1, -1, width)
        for weight, bias in zip(weights, biases, strict=True)
    )
    queries, key = rotate_heads(queries, key, cos.view(1, 1, -1), sin.view(1, 1, -1))
    slot = torch.as_tensor(position, dtype=torch.long, device=keys.device).view(1)
    keys.index_copy_(2, slot, key.transpose(1, 2))
    values.index_copy_(2, slot, value.transpose(1, 2))
    return queries[0]


def gate_token(
    hidden: Tensor, norm_weight: Tensor, eps: float, gate_weight: Tensor, up_weight: Tensor
) -> Tensor:
    """``silu(W_gate norm(x)) * W_up norm(x)`` of ONE token: ``[..., I]``."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    normed = F.rms_norm(hidden.to(wide), (hidden.shape[-1],), norm_weight.to(wide), eps)
    gate, up = (F.linear(normed, w.to(wide)).to(hidden.dtype) for w in (gate_weight, up_weight))
    return F.silu(gate) * up


def linear_token(inputs: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """``residual + W x`` of ONE token: ``[..., O]``."""
    return residual + F.linear(inputs, weight)


def attend_token(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
    count: bool = False,
) -> Tensor:
    """Attention ``[B, H, E]`` of a token a sequence to the cached ones, ``[B, V, L, E]``.

    ``length`` counts the slots in use; as a tensor, those before this token's, and ``count`` adds
    one to it.
    """
    last = length - 1 if isinstance(length, int) else length
    seen = (torch.arange(keys.shape[2], device=keys.device) <= last).expand(len(queries), -1)
    if mask is not None:
        seen = seen & mask
    num_groups = queries.shape[1] // keys.shape[1]
    wide = torch.promote_types(queries.dtype, torch.float32)
    keys, values = (t.repeat_interleave(num_groups, dim=1).to(wide) for t in (keys, values))
    scores = torch.einsum("bhe,bhle->bhl", queries.to(wide), keys) * scale
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    # A token that sees nothing (padding) attends to nothing.
    weights = scores.softmax(-1).nan_to_num(0.0)
    if count and isinstance(length, Tensor):
        length.add_(1)
    return torch.einsum("bhl,bhle->bhe", weights, values).to(queries.dtype)


def attend_and_read(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
    hidden: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    cartesian: bool,
    past: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``hidden`` ``[B, ..., D]`` with the memory's correction; counts ``length`` up if a tensor."""
    if past is not None:
        for cached, before in zip((keys, values), past, strict=True):
            cached[:, :, :-1] = before
    attended = attend_token(queries, keys, values, length, mask, scale, True)
    correction = headwise_memory_cached(attended, row_keys, col_keys, value_cache, top_k, cartesian)
    return hidden + correction.view(hidden.shape)

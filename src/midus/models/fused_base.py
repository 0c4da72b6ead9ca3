"""Blocks of the base in fewer and larger steps, for training and for decoding.

Norms, rotary embeddings and the FFN's gate take many passes over memory in eager PyTorch.
`fuse_blocks` gives every block of a Llama-like model a forward that computes them in one kernel
each way, whatever method the model has grown by; for one token over a static cache the whole block
is six kernels. Weights, names and checkpoints stay as they are.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer

from midus.models.families import find_family
from midus.models.fused import (
    attend_heads,
    cache_layer,
    can_stream,
    fused_norm,
    is_llama_like,
    is_one_token,
    is_plain_linear,
    is_watched,
    project_one,
    seen_slots,
    suits,
)
from midus.ops import attend_token, gate_token, gated, linear_token


def fuse_blocks(model: Any) -> int:
    """Gives the model's own blocks the fused forward on GPUs; says how many have it.

    Elsewhere, and under a compiler, they compute as before. `unfuse_blocks` undoes it.
    """
    blocks = [block for block in model.model.layers if _can_be_fused(block, model.config)]
    for block in blocks:
        block.forward = types.MethodType(_forward, block)
    return len(blocks)


def unfuse_blocks(model: Any) -> None:
    """Gives every block its own forward back."""
    for block in model.model.layers:
        if getattr(block.__dict__.get("forward"), "__func__", None) is _forward:
            del block.forward


@contextmanager
def fused_blocks(model: Any) -> Iterator[None]:
    """`fuse_blocks` while open, unless it was done before."""
    was_fused = any("forward" in block.__dict__ for block in model.model.layers)
    if not was_fused:
        fuse_blocks(model)
    try:
        yield
    finally:
        if not was_fused:
            unfuse_blocks(model)


def _can_be_fused(block: Any, config: Any) -> bool:
    return (
        type(block) is find_family(config.model_type).block_class
        and "forward" not in block.__dict__
        and is_llama_like(config, block.self_attn)
        and config.hidden_act == "silu"
    )


def _forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """As the family's block, which takes these by the same names."""
    after, mlp = self.post_attention_layernorm, self.mlp
    if not suits(self, hidden_states, kwargs) or is_watched(after) or is_watched(mlp):
        return type(self).forward(self, hidden_states, **kwargs)
    if len(hidden_states) == 1 and is_one_token(hidden_states):
        decoded = _decode_step(self, hidden_states, kwargs)
        if decoded is not None:
            return decoded
    hidden_states = hidden_states + attend_heads(self, hidden_states, kwargs)
    normed = fused_norm(after, hidden_states)
    return hidden_states + mlp.down_proj(gated(mlp.gate_proj(normed), mlp.up_proj(normed)))


def _decode_step(block: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """One token of one sequence over a static cache, or None where that is not what there is."""
    layer, mask = cache_layer(block, kwargs), kwargs.get("attention_mask")
    attention, norm, mlp = block.self_attn, block.post_attention_layernorm, block.mlp
    linears = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if type(layer) is not StaticLayer or not (mask is None or mask.dtype == torch.bool):
        return None
    if not can_stream(block, hidden_states) or not all(
        _is_plain(linear, hidden_states) for linear in linears
    ):
        return None
    query, key, value = project_one(block, hidden_states, layer, kwargs)
    attended = attend_token(
        query,
        key,
        value,
        layer.cumulative_length,
        seen_slots(mask, hidden_states),
        attention.scaling,
        count=True,
    )
    hidden_states = linear_token(
        attended.flatten(1).unsqueeze(0), attention.o_proj.weight, hidden_states
    )
    opened = gate_token(
        hidden_states, norm.weight, norm.variance_epsilon, mlp.gate_proj.weight, mlp.up_proj.weight
    )
    return linear_token(opened, mlp.down_proj.weight, hidden_states)


def _is_plain(linear: nn.Module, hidden_states: Tensor) -> bool:
    return is_plain_linear(linear, hidden_states) and linear.bias is None

"""Blocks of the base in fewer and larger steps, for training and for decoding.

Norms, rotary embeddings and the FFN's gate take many passes over memory in eager PyTorch.
`fuse_blocks` gives every block of a Llama-like model a forward that computes them in one kernel
each way, whatever method the model has grown by; for one token over a static cache the whole block
is six kernels. Weights, names and checkpoints stay as they are.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation
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
    is_plain_mask,
    is_watched,
    project_one,
    projections,
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
        # A bound method would be pickled by its name, which the block's class does not have.
        block.forward = functools.partial(_forward, block)
    return len(blocks)


def unfuse_blocks(model: Any) -> None:
    """Gives every block its own forward back."""
    for block in model.model.layers:
        if _is_fused(block):
            del block.forward


@contextmanager
def fused_blocks(model: Any) -> Iterator[None]:
    """`fuse_blocks` while open, unless it was done before."""
    was_fused = any(_is_fused(block) for block in model.model.layers)
    if not was_fused:
        fuse_blocks(model)
    try:
        yield
    finally:
        if not was_fused:
            unfuse_blocks(model)


def _is_fused(block: Any) -> bool:
    return getattr(block.__dict__.get("forward"), "func", None) is _forward


def _can_be_fused(block: Any, config: Any) -> bool:
    return (
        type(block) is find_family(config.model_type).block_class
        and "forward" not in block.__dict__
        and is_llama_like(config, block.self_attn)
    )


def _forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """As the family's block, which takes these by the same names."""
    if not (suits(self, hidden_states, kwargs) and _has_plain_ffn(self)):
        return type(self).forward(self, hidden_states, **kwargs)
    after, mlp = self.post_attention_layernorm, self.mlp
    if len(hidden_states) == 1 and is_one_token(hidden_states):
        decoded = _decode_step(self, hidden_states, kwargs)
        if decoded is not None:
            return decoded
    readers = projections(self.self_attn)
    hidden_states, *normed = fused_norm(self.input_layernorm, readers, hidden_states)
    attended = attend_heads(self, normed, kwargs)
    both = (mlp.gate_proj, mlp.up_proj)
    hidden_states, for_gate, for_up = fused_norm(after, both, hidden_states, attended)
    return hidden_states + mlp.down_proj(gated(mlp.gate_proj(for_gate), mlp.up_proj(for_up)))


def _decode_step(block: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """One token of one sequence over a static cache, or None where that is not what there is."""
    layer, mask = cache_layer(block, kwargs), kwargs.get("attention_mask")
    attention, norm, mlp = block.self_attn, block.post_attention_layernorm, block.mlp
    linears = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if type(layer) is not StaticLayer or not is_plain_mask(mask):
        return None
    if not can_stream(block, hidden_states, layer) or not all(
        _is_plain(linear, hidden_states) for linear in linears
    ):
        return None
    slots: Any = layer  # whose tensors may be None by its class, not once it is in use
    key, value, length = slots.keys, slots.values, slots.cumulative_length
    query = project_one(block, hidden_states, key, value, length, kwargs)
    attended = attend_token(
        query,
        key,
        value,
        length,
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


def _has_plain_ffn(block: Any) -> bool:
    """Whether norm and FFN are the family's, with SiLU, and nobody watches them."""
    family = find_family(block.self_attn.config.model_type)
    after, mlp = block.post_attention_layernorm, block.mlp
    return (
        type(after) is family.norm_class
        and type(mlp) is family.mlp_class
        and type(mlp.act_fn) in (SiLUActivation, nn.SiLU)
        and not (is_watched(after) or is_watched(mlp) or is_watched(mlp.act_fn))
    )


def _is_plain(linear: nn.Module, hidden_states: Tensor) -> bool:
    return is_plain_linear(linear, hidden_states) and linear.bias is None

"""What a block computes on a GPU, in fewer and larger steps.

The plain path of a memory block, norm and attention module of the family one after the other, is
what `block.py` says; here the same is computed for the families whose attention is Llama's own:
with a fused norm and rotary embedding for any number of tokens, and in three kernels for a single
one, which is what decoding is made of; the second of these copies a cache that grows, as
`torch.cat` would. Where something does not fit, the plain path runs.
`fused_base.py` does the same for blocks of the base.

Parts and weights are looked up anew for each token, since they may change between two; in
PyTorch's own dictionaries, since a module's attributes would take longer to find than the kernels.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from midus.memory.bypass import Bypass
from midus.memory.hive import HiveValues
from midus.memory.hml import HeadwiseMemory
from midus.memory.keys import ProductKeys
from midus.models.families import FAMILIES, find_family
from midus.ops import attend_and_read, project_token, rms_norm, rotate_heads

_DEVICES = frozenset({"cuda"})
_CAST_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# Arguments of a block that its attention function does not get by that name.
_NAMED = frozenset({"attention_mask", "past_key_values", "position_embeddings", "use_cache"})


def is_llama_like(config: Any, attention: Any) -> bool:
    """Whether a block's norm and attention compute what Llama's do, over all of the past."""
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return find_family(config.model_type).has_llama_attention and window is None


def suits(block: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a Llama-like block is on a GPU, and nobody watches or replaces its parts."""
    if hidden_states.device.type not in _DEVICES or torch.compiler.is_compiling():
        return False
    parts, positions = block._modules, kwargs.get("position_embeddings")
    attention, norm = parts["self_attn"], parts["input_layernorm"]
    attention_classes, norm_classes = _llama_classes()
    return (
        positions is not None
        and type(attention) in attention_classes
        and type(norm) in norm_classes
        and positions[0].shape[-1] == attention.head_dim
        and (weight := norm._parameters.get("weight")) is not None
        and (
            weight.dtype == hidden_states.dtype == positions[0].dtype
            or _are_cast(hidden_states, weight, positions[0])
        )
        and _attention_name(attention.config) in ALL_ATTENTION_FUNCTIONS
        and not is_watched(attention, norm)
    )


def _are_cast(hidden_states: Tensor, weight: Tensor, angles: Tensor) -> bool:
    """Whether autocast sees to what the products read, whatever the types are."""
    types = {hidden_states.dtype, weight.dtype, angles.dtype}
    return torch.is_autocast_enabled(hidden_states.device.type) and types <= _CAST_TYPES


def _attention_name(config: Any) -> Any:
    # Where the config keeps it: its own look-up takes longer than the rest of `suits`.
    name = object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")
    return config._attn_implementation if name is None else name


@functools.cache
def _llama_classes() -> tuple[frozenset[type], frozenset[type]]:
    """Attention and norm classes that compute what Llama's do; adapters put others in place."""
    families = [family for family in FAMILIES.values() if family.has_llama_attention]
    return (
        frozenset(family.attention_class for family in families),
        frozenset(family.norm_class for family in families),
    )


def is_one_token(hidden_states: Tensor) -> bool:
    """Whether this is a step of decoding, for which there are kernels of their own."""
    return (
        hidden_states.shape[1] == 1
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(hidden_states.device.type)
    )


def attend_heads(block: Any, normed: Sequence[Tensor], kwargs: dict[str, Any]) -> Tensor:
    """``Attn'(LN(x))``, or with the output projection where the block has one.

    To be called where ``suits``; ``normed`` is LN(x) for each of ``projections``.
    """
    attention = block.self_attn
    query, key, value = _project(attention, normed, kwargs)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    cache = kwargs.get("past_key_values")
    if cache is not None:
        key, value = cache.update(key, value, attention.layer_idx)
    others = {name: value for name, value in kwargs.items() if name not in _NAMED}
    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    attended, _ = attend(
        attention,
        query,
        key,
        value,
        kwargs.get("attention_mask"),
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        **others,
    )
    out: Tensor = attention.o_proj(attended.flatten(2))
    return out


def decode_step(block: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """``M(x)`` of one token a sequence, or None where it takes more than the three kernels.

    To be called where ``suits`` and ``is_one_token``.
    """
    if not _reads_plainly(block):
        return None
    memory = block._modules["memory"]._modules
    keys, table = memory["keys"], memory["values"].fresh_cache()
    layer, mask = cache_layer(block, kwargs), kwargs.get("attention_mask")
    if table is None or layer is None or not is_plain_mask(mask):
        return None
    is_static = type(layer) is StaticLayer
    length: int | Tensor
    past = None
    if hidden_states.shape[0] == 1 and can_stream(block, hidden_states, layer):
        if is_static:
            key, value, length = layer.keys, layer.values, layer.cumulative_length
            query = project_one(block, hidden_states, key, value, length, kwargs)
        else:
            # What ``layer.update`` does, with the copying left to the kernel that reads it all.
            past = layer.keys, layer.values
            slot = past[0].shape[2]
            key = _empty_keys(block, hidden_states, slot + 1)
            value = torch.empty_like(key)
            query = project_one(block, hidden_states, key, value, slot, kwargs)
            length = slot + 1
    else:
        _, *normed = fused_norm(block.input_layernorm, projections(block.self_attn), hidden_states)
        query, key, value = _project(block.self_attn, normed, kwargs)
        query = query[:, 0]  # [B, H, E]
        key, value = layer.update(key.transpose(1, 2), value.transpose(1, 2))
        length = layer.cumulative_length - 1 if is_static else key.shape[2]
    out = attend_and_read(
        query,
        key,
        value,
        length,
        seen_slots(mask, hidden_states),
        block._modules["self_attn"].scaling,
        hidden_states,
        keys._parameters["row_keys"],
        keys._parameters["col_keys"],
        table,
        keys.top_k,
        past,
    )
    if past is not None:  # not before all slots are filled: what failed may be tried again
        layer.keys, layer.values = key, value
    return out


def cache_layer(block: Any, kwargs: dict[str, Any]) -> Any:
    """The block's part of the cache, if it is one that the kernels know and has been used.

    Caches that do more than hold (move layers in and out, say) are left to themselves.
    """
    cache, index = kwargs.get("past_key_values"), block._modules["self_attn"].layer_idx
    if cache is None or type(cache).update is not Cache.update or cache.offloading:
        return None
    layer: Any = cache.layers[index] if len(cache.layers) > index else None
    known = type(layer) in (DynamicLayer, StaticLayer) and layer.is_initialized
    # One that was only made ready, by ``early_initialization``, knows no shape yet.
    return layer if known and layer.keys.dim() == 4 else None


def is_plain_mask(mask: Any) -> bool:
    """Whether there is none, or it says of each slot whether it counts, to all heads alike."""
    return mask is None or (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.dim() == 4
        and mask.shape[1] == 1
    )


def seen_slots(mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """A plain mask of a single query as ``[B, L]``."""
    return None if mask is None else mask[:, 0, 0].expand(len(hidden_states), -1)


def _project(
    attention: Any, normed: Sequence[Tensor], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Queries, keys and values, the first two rotated: ``[B, T, heads, E]`` each."""
    shape = (*normed[0].shape[:2], -1, attention.head_dim)
    query, key, value = (
        linear(read).view(shape)
        for linear, read in zip(projections(attention), normed, strict=True)
    )
    return *rotate_heads(query, key, *kwargs["position_embeddings"]), value


def fused_norm(
    norm: Any, readers: Sequence[nn.Module], hidden_states: Tensor, added: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The stream and its RMSNorm for each reader, as one kernel each way.

    Args:
        norm: Of Llama's kind.
        readers: The modules that read it.
        hidden_states: The stream.
        added: What is added to the stream before it is normed.
    """
    return rms_norm(
        hidden_states,
        norm.weight,
        norm.variance_epsilon,
        added,
        _read_type(readers, hidden_states),
        len(readers),
    )


def _read_type(readers: Sequence[nn.Module], hidden_states: Tensor) -> torch.dtype | None:
    """What all readers would cast a norm to, or None where some may want it as it is."""
    device = hidden_states.device.type
    is_cast = torch.is_autocast_enabled(device) and all(
        type(reader) in (nn.Linear, Bypass) and not is_watched(reader) for reader in readers
    )
    return torch.get_autocast_dtype(device) if is_cast else None


def _empty_keys(block: Any, hidden_states: Tensor, num_slots: int) -> Tensor:
    attention = block._modules["self_attn"]
    width = attention.head_dim
    num_heads = projections(attention)[1]._parameters["weight"].shape[0] // width
    return hidden_states.new_empty(1, num_heads, num_slots, width)


def project_one(
    block: Any,
    hidden_states: Tensor,
    key: Tensor,
    value: Tensor,
    slot: int | Tensor,
    kwargs: dict[str, Any],
) -> Tensor:
    """Queries of one token of one sequence; its key and value go to a slot of these caches."""
    parts = block._modules
    norm, (q, k, v) = parts["input_layernorm"], projections(parts["self_attn"])
    q, k, v = q._parameters, k._parameters, v._parameters
    cos, sin = kwargs["position_embeddings"]
    return project_token(
        hidden_states,
        norm._parameters["weight"],
        norm.variance_epsilon,
        (q["weight"], k["weight"], v["weight"]),
        (q["bias"], k["bias"], v["bias"]),
        cos,
        sin,
        key,
        value,
        slot,
    )


def _reads_plainly(block: Any) -> bool:
    """Whether what follows attention is HML alone, as the paper has it."""
    parts = block._modules
    memory = parts["memory"]
    if type(memory) is not HeadwiseMemory or block.attention_residual:
        return False
    if parts.get("bypass") is not None:
        return False
    inner = memory._modules
    keys, values = inner["keys"], inner["values"]
    silent: tuple[Any, ...] = (
        parts["self_attn"].o_proj,
        parts.get("head_outputs"),
        inner["query_proj"],
        inner["query_norm"],
        parts["memory_output_proj"],
    )
    return (
        type(keys) is ProductKeys
        and type(values) is HiveValues
        and {*map(type, silent)} == {nn.Identity}
        and not is_watched(memory, keys, values, *silent)
        and _is_flat(keys._parameters.get("row_keys"))
        and _is_flat(keys._parameters.get("col_keys"))
    )


def can_stream(block: Any, hidden_states: Tensor, layer: Any) -> bool:
    """Whether projections and cache are plain matrices that one kernel can read."""
    parts = block._modules
    q, k, v = projections(parts["self_attn"])
    if not (type(q) is type(k) is type(v) is nn.Linear) or is_watched(q, k, v):
        return False
    q, k, v = q._parameters, k._parameters, v._parameters
    if "bias" not in q or "bias" not in k or "bias" not in v:
        return False
    biases = q["bias"], k["bias"], v["bias"]
    norm = parts["input_layernorm"]._parameters
    tensors = (norm.get("weight"), q.get("weight"), k.get("weight"), v.get("weight"))
    return _are_like(hidden_states, *tensors, layer.keys, layer.values) and (
        biases[0] is biases[1] is biases[2] is None or _are_like(hidden_states, *biases)
    )


def projections(attention: Any) -> tuple[Any, Any, Any]:
    """Linear maps to queries, keys and values, which read a block's first norm."""
    parts = attention._modules
    return parts["q_proj"], parts["k_proj"], parts["v_proj"]


def is_plain_linear(module: Any, hidden_states: Tensor) -> bool:
    """Whether a module is a matrix of the tokens' type, on their device, and no more than that."""
    if type(module) is not nn.Linear or is_watched(module):
        return False
    parameters = module._parameters
    return (
        _are_like(hidden_states, parameters.get("weight"))
        and "bias" in parameters
        and ((bias := parameters["bias"]) is None or _are_like(hidden_states, bias))
    )


def _are_like(hidden_states: Tensor, *tensors: Any) -> bool:
    """Whether kernels can read all of them beside the tokens: of their type, on their device."""
    dtype, device = hidden_states.dtype, hidden_states.device
    for tensor in tensors:
        if not _is_flat(tensor) or tensor.dtype != dtype or tensor.device != device:
            return False
    return True


def _is_flat(weight: Any) -> TypeGuard[Tensor]:
    """Whether a kernel can read a weight: sharded and packed ones have classes of their own."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_contiguous()


def is_watched(*modules: nn.Module) -> bool:
    """Whether somebody listens to a module's calls or has put another function in its place."""
    for module in modules:
        state = module.__dict__
        hooks = state["_forward_hooks"]
        if (
            (hooks and not _are_idle(hooks))
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
        ):
            return True
    return False


def _are_idle(hooks: Any) -> bool:
    """Whether hooks are transformers' own for attention weights, never taken off, and rest."""
    collector = getattr(output_capturing, "_active_collector", None)
    return (
        collector is not None
        and "attentions" not in (collector.get() or {})
        and all(hook.__module__ == output_capturing.__name__ for hook in hooks.values())
    )

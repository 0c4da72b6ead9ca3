"""Attention functions for captured graphs, by transformers' own interface.

transformers builds a mask wherever a graph is captured, since it cannot look into tensors there;
with a mask PyTorch's fastest kernels are out. Where it is known beforehand what the mask would say,
these stand in for ``sdpa`` while the graph is captured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus.ops import attend_token

_TOKEN = "midus_token"
_CAUSAL = "midus_causal"
# Positions that depend on the longest one so far, which a graph cannot ask for.
_GROWING_ROPES = ("dynamic", "longrope")


def why_not_captured(model: Any) -> str:
    """What about a model keeps it out of CUDA graphs of any kind; empty if nothing does."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}, and graphs are for CUDA devices"
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model is quantized"
    attention = model.config._attn_implementation
    if attention != "sdpa":
        return f"its attention is {attention!r}, and graphs are for 'sdpa'"
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _GROWING_ROPES:
        return f"its positions are {rope['rope_type']!r}, which change as the text grows"
    return ""


@contextmanager
def token_attention(model: Any) -> Iterator[None]:
    """While open, one token attends over a static cache by our kernel."""
    with _attention(model, _TOKEN, _attend_token, sdpa_mask):
        yield


@contextmanager
def causal_attention(model: Any) -> Iterator[None]:
    """While open, every token attends to itself and all before: no mask is made.

    For whole sequences without padding, cache or window.
    """
    with _attention(model, _CAUSAL, sdpa_attention_forward, lambda *_, **__: None):
        yield


@contextmanager
def _attention(
    model: Any, name: str, function: Callable[..., Any], mask: Callable[..., Any]
) -> Iterator[None]:
    """While open, the model's attention is this one, where it was PyTorch's."""
    before = model.config._attn_implementation
    if before != "sdpa":
        yield
        return
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _attend_token(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cached_length: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers wants it: one token over a static cache."""
    if cached_length is None or query.shape[2] != 1 or query.device.type != "cuda":
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return out
    mask = None if attention_mask is None else attention_mask[:, 0, 0].expand(len(query), -1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_token(query[:, :, 0], key, value, cached_length, mask, scale).unsqueeze(1), None

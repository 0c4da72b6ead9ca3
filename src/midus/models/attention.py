"""Attn': a family's own attention, stopped before the output projection.

Paper, Section 4.2: ``a'(x) = [a_1(x) | ... | a_H(x)]``, the head outputs side by side.
"""

from typing import Any

from torch import nn

from midus.models.families import find_family


def make_head_attention(config: Any, layer_idx: int, keep_output_proj: bool) -> nn.Module:
    """The family's attention module, without its ``o_proj`` unless asked to keep it."""
    attention: nn.Module = find_family(config.model_type).attention_class(config, layer_idx)
    if not keep_output_proj:
        del attention.o_proj
        # No registered part: whoever adapts every `o_proj` by its name must not find this one.
        attention.__dict__["o_proj"] = nn.Identity()
    return attention


def attended_dim(config: Any, keep_output_proj: bool) -> int:
    """Width of what that module returns."""
    if keep_output_proj:
        return int(config.hidden_size)
    return int(config.num_attention_heads * head_dim(config))


def head_dim(config: Any) -> int:
    """Width of one attention head; read, since it need not be ``hidden_size // num_heads``."""
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)

"""The memory block: ``M(x) = x + Mem(Attn'(LN(x)))``.

Paper, Section 4.1, Eq. 2. It stands before its anchor, a block of the base, and copies that
block's attention and the norm before it; where the paper's duplicated block has an FFN it has a
memory layer. The layer's values start at zero, so a fresh block returns its input. Beyond the
paper, ``bypass`` adds ``W_b Attn'(LN(x))``, ``W_b LN(x)`` or both, with W_b zero at the start; or
it is joined, ``M(x) = x + W_b (Attn'(LN(x)) + Mem(.))``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from midus.errors import MidusError
from midus.memory import memory_layer_class
from midus.memory.bypass import Bypass
from midus.memory.output_proj import MemoryOutputProj
from midus.models.attention import attended_dim, head_dim, make_head_attention
from midus.models.families import find_family
from midus.models.fused import (
    attend_heads,
    decode_step,
    fused_norm,
    is_llama_like,
    is_one_token,
    projections,
    suits,
)
from midus.models.switch import Gates, hold_slots, mark_cache


class MemoryBlock(GradientCheckpointingLayer):
    """One inserted block.

    Post-attention and post-FFN norms of families that have them (Gemma, OLMo 2) are not applied
    to the correction; a family without a norm before attention has none here.

    Args:
        config: Config of the up-scaled model.
        layer_idx: Index in the final stack; the KV cache depends on it.
    """

    gate = 1.0
    """What the correction is multiplied by; see `switch.py`, which sets it and the next."""
    model_gates: Gates = ()

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        memory = config.memory_config
        family = find_family(config.model_type)
        width = attended_dim(config, memory.attn_output_proj)
        if memory.attention_residual and width != config.hidden_size:
            raise MidusError(
                f"attention_residual adds the block's input ({config.hidden_size} wide) to the "
                f"head outputs ({config.num_attention_heads} heads of {head_dim(config)}: {width} "
                "wide); use it with attn_output_proj on this base"
            )
        self.attention_residual = memory.attention_residual
        self.input_layernorm = (
            family.norm_class(config.hidden_size, eps=config.rms_norm_eps)
            if family.has_pre_norm
            else nn.Identity()
        )
        self.self_attn = make_head_attention(config, layer_idx, memory.attn_output_proj)
        self._is_llama_like = is_llama_like(config, self.self_attn)
        # Where a tensor-parallel plan puts the heads of all ranks side by side.
        self.head_outputs = None if memory.attn_output_proj else nn.Identity()
        self.memory = memory_layer_class(memory.kind)(
            memory, config.hidden_size, config.num_attention_heads, width
        )
        self.memory_output_proj = (
            MemoryOutputProj(config.hidden_size) if memory.memory_output_proj else nn.Identity()
        )
        self.is_joined = memory.bypass == "joined"
        if self.is_joined and width != config.hidden_size:
            raise MidusError(
                f"bypass='joined' adds what the memory writes ({config.hidden_size} wide) to the "
                f"head outputs ({config.num_attention_heads} heads of {head_dim(config)}: {width} "
                "wide); use bypass='attention' with memory_output_proj on this base"
            )
        self.bypass_reads_attention = memory.bypass != "stream"
        self.bypass_reads_stream = memory.bypass in ("stream", "both")
        read_dims = (width,) if self.bypass_reads_attention else ()
        read_dims += (config.hidden_size,) if self.bypass_reads_stream else ()
        self.bypass = None if memory.bypass == "none" else Bypass(read_dims, config.hidden_size)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            # The backward pass computes the block again, when the gate may be another.
            kwargs["gate"] = self.gate
        return super().__call__(*args, **kwargs)  # type: ignore[no-untyped-call]  # transformers'

    def forward(self, hidden_states: Tensor, gate: float | None = None, **kwargs: Any) -> Tensor:
        gate = self.gate if gate is None else gate
        if gate != 1.0:
            return self._forward_gated(hidden_states, gate, kwargs)
        if self._is_llama_like and suits(self, hidden_states, kwargs):
            if is_one_token(hidden_states):
                decoded = decode_step(self, hidden_states, kwargs)
                if decoded is not None:
                    return decoded
            hidden_states, normed, attended = self._attend_fused(hidden_states, kwargs)
        else:
            normed = self.input_layernorm(hidden_states)
            attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        return hidden_states + self._correct(hidden_states, normed, attended)

    def _attend_fused(
        self, hidden_states: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The stream, its norm where the bypass reads it, and ``Attn'(LN(x))``."""
        readers: tuple[Any, ...] = projections(self.self_attn)
        if self.bypass_reads_stream:
            readers = (*readers, self.bypass)
        stream, query, key, value, *rest = fused_norm(self.input_layernorm, readers, hidden_states)
        attended = attend_heads(self, (query, key, value), kwargs)
        return stream, rest[0] if rest else None, attended

    def _correct(self, hidden_states: Tensor, normed: Tensor | None, attended: Tensor) -> Tensor:
        if self.head_outputs is not None:
            attended = self.head_outputs(attended)  # [B, T, H * E]
        read = hidden_states + attended if self.attention_residual else attended
        correction: Tensor = self.memory_output_proj(self.memory(read))  # [B, T, D]
        if self.bypass is None:
            return correction
        if self.is_joined:
            return self.bypass(attended + correction)  # type: ignore[no-any-return]  # a module's call
        found = (attended,) if self.bypass_reads_attention else ()
        stream = (normed,) if self.bypass_reads_stream else ()
        return correction + self.bypass(*found, *stream)  # type: ignore[no-any-return]  # likewise

    @torch.no_grad()
    def scale_correction(self, factor: float) -> None:
        """Multiplies what the block adds, by the weights that it is linear in."""
        for table in () if self.is_joined else self.memory.value_tables():
            table.mul_(factor)
        if self.bypass is not None:
            self.bypass.weight.mul_(factor)

    @property
    def memory_map(self) -> Tensor | None:
        """The matrix that what the memory found goes through; None where it is added as it is."""
        mapped = self.bypass if self.is_joined else self.memory_output_proj
        return mapped.weight if isinstance(mapped, Bypass | MemoryOutputProj) else None

    def _forward_gated(self, hidden_states: Tensor, gate: float, kwargs: dict[str, Any]) -> Tensor:
        cache = kwargs.get("past_key_values")
        if cache is not None:
            mark_cache(cache, self.model_gates)
        if gate == 0.0:
            if cache is not None:
                hold_slots(self.self_attn, hidden_states, cache)
            return hidden_states
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        return hidden_states + gate * self._correct(hidden_states, normed, attended)


def copied_from_anchor(name: str) -> bool:
    """Whether the block's tensor of that name is a copy of its anchor's."""
    return name.startswith(("self_attn.", "input_layernorm."))

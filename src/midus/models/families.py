"""The model families that can grow: one row each, their classes found by name.

A family's row says how its transformers module and classes are called and which norm stands
before attention. Everything else about a family is its own transformers code.
"""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from midus.errors import MidusError

PREFIX = "midus_"


@dataclass(frozen=True)
class Family:
    """One family: names of its classes in transformers and of its norm before attention."""

    model_type: str
    """`config.model_type` of the base; the up-scaled model's is this with `midus_` before it."""
    module: str
    """Package under `transformers.models`."""
    prefix: str
    """How the block, attention, norm and causal-LM classes begin."""
    text_prefix: str | None = None
    """How the config and decoder classes begin, where that differs."""
    has_pre_norm: bool = True
    """Whether the block norms its input before attention (`input_layernorm`)."""
    has_llama_attention: bool = False
    """Whether norm and attention compute what Llama's do: no norms of heads, no capped scores."""

    def _named(self, file: str, suffix: str, prefix: str | None = None) -> Any:
        module = import_module(f"transformers.models.{self.module}.{file}_{self.module}")
        return getattr(module, (prefix or self.prefix) + suffix)

    @cached_property
    def config_class(self) -> Any:
        return self._named("configuration", "Config", self.text_prefix)

    @cached_property
    def model_class(self) -> Any:
        return self._named("modeling", "Model", self.text_prefix)

    @cached_property
    def causal_lm_class(self) -> Any:
        return self._named("modeling", "ForCausalLM")

    @cached_property
    def block_class(self) -> Any:
        return self._named("modeling", "DecoderLayer")

    @cached_property
    def attention_class(self) -> Any:
        return self._named("modeling", "Attention")

    @cached_property
    def norm_class(self) -> Any:
        return self._named("modeling", "RMSNorm")

    @cached_property
    def mlp_class(self) -> Any:
        return self._named("modeling", "MLP")

    @cached_property
    def rotary_class(self) -> Any:
        return self._named("modeling", "RotaryEmbedding")


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "llama", "Llama", has_llama_attention=True),
        Family("mistral", "mistral", "Mistral", has_llama_attention=True),
        Family("qwen2", "qwen2", "Qwen2", has_llama_attention=True),
        Family("qwen3", "qwen3", "Qwen3"),
        Family("gemma2", "gemma2", "Gemma2"),
        Family("gemma3_text", "gemma3", "Gemma3", text_prefix="Gemma3Text"),
        Family("olmo2", "olmo2", "Olmo2", has_pre_norm=False),
    )
}


def find_family(model_type: str) -> Family:
    """The family of a base or up-scaled model type."""
    name = model_type.removeprefix(PREFIX)
    if name not in FAMILIES:
        raise MidusError(
            f"model family {name!r} is not supported; known families: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def is_upscaled(model_type: str) -> bool:
    """Whether this is the model type of a model with memory blocks."""
    return model_type.startswith(PREFIX)

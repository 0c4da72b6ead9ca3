"""What is measured: a method, its memory layer and its placement, `method[:memory][@placement]`.

In the place of a memory layer may stand a recipe of `midus train`, as in `midus:short`: its blocks
in their places. How it trains is not part of it.
"""

from dataclasses import dataclass, replace
from typing import Any

from midus.config import MemoryConfig, UpscaleConfig
from midus.errors import MidusError
from midus.memory import MEMORY_LAYERS
from midus.models.attention import attended_dim
from midus.training.recipes import RUN_RECIPES, recipe_blocks
from midus.upscaling.methods import find_method, plan_upscaling

# The rows of the paper's efficiency table.
PAPER_METHODS = "base,llama_pro,opt_deus,midus:linear,midus:pkm,midus:ultramem,midus:hml"

_METHOD_NAMES = {
    "base": "Base",
    "llama_pro": "Llama Pro",
    "opt_deus": "OpT-DeUS",
    "avg_deus": "Avg-DeUS",
    "lesa": "LESA",
    "solar": "SOLAR",
    "stack": "Stack",
    "gradual_stack": "Gradual Stack",
    "midus": "MIDUS",
}
_MEMORY_NAMES = {"hml": "HML", "linear": "Linear", "pkm": "PKM", "ultramem": "UltraMem"}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One way to grow a model."""

    method: str
    memory: str | None = None
    """Memory layer, or a recipe that says what blocks are; for midus."""
    placement: str | None = None
    """None: the method's own."""
    num_subkeys: int | None = None
    """None: the default of the memory layer."""
    top_k: int | None = None
    """None: the default of the memory layer."""

    @property
    def label(self) -> str:
        """Its name in tables."""
        parts = [_METHOD_NAMES.get(self.method, self.method)]
        if self.memory:
            named = f"recipe: {self.memory}" if self._recipe else self.memory
            parts.append(_MEMORY_NAMES.get(self.memory, named))
        if self.placement:
            parts.append(f"({self.placement.replace('_', '-')})")
        return " ".join(parts)

    @property
    def resolved_placement(self) -> str | None:
        """Where its blocks stand."""
        own = find_method(self.method).default_placement
        return self.placement or self._recipe.get("placement", own)

    @property
    def _recipe(self) -> dict[str, Any]:
        return recipe_blocks(self.memory) if self.memory in RUN_RECIPES else {}

    @property
    def memory_config(self) -> MemoryConfig:
        """Options of its memory layer."""
        options = {
            name: value
            for name in ("num_subkeys", "top_k")
            if (value := getattr(self, name)) is not None
        }
        if self.memory:
            options = {**self._recipe.get("memory", {"kind": self.memory}), **options}
        return MemoryConfig(**options)

    def names(self) -> dict[str, Any]:
        """The columns that say which row it is."""
        return {
            "method": self.method,
            "memory": self.memory,
            "placement": self.resolved_placement,
            "label": self.label,
        }

    def grown_config(self, base_config: Any) -> Any:
        """The config of the model it makes of a base; refuses what cannot be made."""
        memory = self.memory_config
        if self._recipe and attended_dim(base_config, keep_output_proj=False) != (
            base_config.hidden_size
        ):
            memory = replace(memory, attn_output_proj=True)  # as docs/training.md has it
        placement = self.placement or self._recipe.get("placement")
        upscaling = UpscaleConfig(method=self.method, placement=placement, memory=memory)
        return plan_upscaling(base_config, upscaling, {})[1]

    def changed(self, **values: Any) -> "Subject":
        """The same with other placement, sub-keys or Top-k."""
        if self.memory is None and values.keys() & {"num_subkeys", "top_k"}:
            raise MidusError(
                f"method {self.method!r} has no memory layer, so no {', '.join(values)}; "
                "use midus, such as midus:hml"
            )
        return replace(self, **values)


def parse_subjects(text: str) -> list[Subject]:
    """The subjects a list with commas names."""
    subjects = [_parse_subject(part.strip()) for part in text.split(",")]
    names = [(s.method, s.memory, s.resolved_placement) for s in subjects]
    for subject, name in zip(subjects, names, strict=True):
        if names.count(name) > 1:
            raise MidusError(f"methods={text!r} names {subject.label} twice; give each one once")
    return subjects


def _parse_subject(text: str) -> Subject:
    rest, at, placement = text.partition("@")
    method, colon, memory = rest.partition(":")
    if not method or (at and not placement) or (colon and not memory):
        raise MidusError(
            f"methods={text!r} is not of the form method[:memory][@placement]; "
            "write for example midus:hml or midus:hml@top_heavy"
        )
    inserts_memory = find_method(method).inserts == "memory"
    if memory and not inserts_memory:
        raise MidusError(
            f"methods={text!r} gives a memory layer to {method!r}, which has none; leave it out"
        )
    if memory and memory not in MEMORY_LAYERS and memory not in RUN_RECIPES:
        raise MidusError(
            f"methods={text!r}: {memory!r} is no memory layer ({', '.join(MEMORY_LAYERS)}) and no "
            f"recipe ({', '.join(RUN_RECIPES)}); use one of them"
        )
    if inserts_memory:
        memory = memory or "hml"
    return Subject(method=method, memory=memory or None, placement=placement or None)

"""The sizes that costs are counted from, read off the model as the meta device builds it.

Shape letters: D hidden, A all heads' width, n sub-keys, K top_k, R latent, O width a head writes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.activations import SiLUActivation

from midus.memory.bypass import Bypass
from midus.memory.output_proj import MemoryOutputProj
from midus.memory.queries import QueryProj
from midus.models.attention import attended_dim, head_dim
from midus.models.families import find_family
from midus.models.fitting import make_meta_model
from midus.models.fused import is_llama_like
from midus.models.record import record_of
from midus.upscaling.inspect import describe

_MATRICES = (nn.Linear, QueryProj, MemoryOutputProj, Bypass)
_WIDE_NORMS = ("gemma2", "gemma3_text", "olmo2")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Sizes of one memory layer."""

    kind: str
    values: str
    num_heads: int
    num_subkeys: int
    top_k: int
    attended: int
    """Width of what it reads, all heads together."""
    head_width: int
    latent_dim: int
    hidden: int
    has_query_proj: bool
    has_query_norm: bool
    has_output_proj: bool
    bypass: str
    """What a linear map beside it reads: none, attention, stream or both; or joined."""
    has_residual: bool
    has_attention_proj: bool
    key_params: int
    """Numbers in the keys."""
    value_params: int
    """Numbers in tables and head projections."""

    @property
    def picked(self) -> int:
        """Slots one token reads, all heads together."""
        return self.num_heads * self.top_k

    @property
    def bypasses_attention(self) -> bool:
        return self.bypass in ("attention", "both", "joined")

    @property
    def bypasses_stream(self) -> bool:
        return self.bypass in ("stream", "both")

    @property
    def num_bypasses(self) -> int:
        """Products that are added beside it."""
        return self.bypasses_attention + self.bypasses_stream

    @property
    def num_projections(self) -> int:
        """Products around the memory."""
        own = (self.has_query_proj, self.has_output_proj, self.has_attention_proj)
        return sum(own) + self.num_bypasses

    @property
    def num_slots(self) -> int:
        """Physical slots of a head's table."""
        return self.num_subkeys**2


@dataclass(frozen=True, kw_only=True)
class Norm:
    """One norm of a block."""

    covered: int
    """Numbers of one token it norms."""
    vectors: int
    """Vectors these numbers make up, each with a scale of its own."""
    reads_input: bool
    """Whether it reads the block's input as it is."""
    is_wide: bool
    """Whether its weight is applied in float32, before the result is cast back."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Sizes of one block."""

    params: int
    linear: int
    """Numbers in its weight matrices: a token costs two operations for each."""
    hidden: int
    num_heads: int
    attended: int
    """Width of all heads (A)."""
    kv_width: int
    intermediate: int
    """Zero for a memory block."""
    norms: tuple[Norm, ...]
    can_be_fused: bool
    """Whether it is of the kind that runs in few, large steps on a GPU (`models/fused.py`)."""
    memory: Memory | None

    @property
    def num_bypasses(self) -> int:
        """Products that are added to its output beside the memory."""
        return 0 if self.memory is None else self.memory.num_bypasses


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A base or grown model as its costs see it."""

    config: Any
    base: Block
    inserted: Block | None
    positions: tuple[int, ...]
    """Final indices of the inserted blocks."""
    depth: int
    trains_all: bool
    params_total: int
    params_trainable: int
    vocab: int
    is_tied: bool

    @property
    def hidden(self) -> int:
        return self.base.hidden

    @property
    def lowest(self) -> int:
        """The lowest block the backward pass visits; frozen blocks under it are skipped."""
        return 0 if self.trains_all else min(self.positions)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    def block(self, index: int) -> Block:
        """The block at a final index."""
        is_inserted = self.inserted is not None and index in self.positions
        return self.inserted if is_inserted and self.inserted else self.base

    def trains(self, index: int) -> bool:
        return self.trains_all or index in self.positions


def read_stack(config: Any) -> Stack:
    """The sizes of a grown model, or of a base that was planned as one."""
    facts = describe(config)
    record = record_of(config)
    layers = make_meta_model(config).model.layers
    positions = tuple(record["positions"])
    first_base = next(i for i in range(len(layers)) if i not in positions)
    return Stack(
        config=config,
        base=_read_block(config, layers[first_base]),
        inserted=_read_block(config, layers[positions[0]]) if positions else None,
        positions=positions,
        depth=len(layers),
        trains_all=record["trainable"] != "inserted",
        params_total=facts["params"]["total"],
        params_trainable=facts["params"]["trainable"],
        vocab=config.vocab_size,
        is_tied=bool(config.tie_word_embeddings),
    )


def _read_block(config: Any, layer: nn.Module) -> Block:
    heads, width = config.num_attention_heads, head_dim(config)
    kv_width = config.num_key_value_heads * width
    has_memory = hasattr(layer, "memory")
    matrices = [m.weight for m in layer.modules() if isinstance(m, _MATRICES)]
    return Block(
        params=sum(p.numel() for p in layer.parameters()),
        linear=sum(weight.numel() for weight in matrices),
        hidden=config.hidden_size,
        num_heads=heads,
        attended=heads * width,
        kv_width=kv_width,
        intermediate=0 if has_memory else config.intermediate_size,
        norms=tuple(_norms(config, layer)),
        can_be_fused=_can_be_fused(config, layer),
        memory=_read_memory(config, layer) if has_memory else None,
    )


def _can_be_fused(config: Any, layer: Any) -> bool:
    # Blocks of the base need SiLU as well; memory blocks have no FFN.
    activation = getattr(getattr(layer, "mlp", None), "act_fn", None)
    return is_llama_like(config, layer.self_attn) and (
        activation is None or isinstance(activation, SiLUActivation | nn.SiLU)
    )


def is_fused_norm(block: Block, norm: Norm) -> bool:
    """Whether the fused path has a kernel for a norm: both of a base block, or the first."""
    return block.memory is None or norm.reads_input


def _norms(config: Any, layer: Any) -> Iterator[Norm]:
    width = head_dim(config)
    widths = {
        "q_norm": config.num_attention_heads * width,
        "k_norm": config.num_key_value_heads * width,
    }
    for path, module in layer.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            name = path.rpartition(".")[2]
            covered = widths.get(name, config.hidden_size)
            yield Norm(
                covered=covered,
                vectors=covered // module.weight.numel(),
                reads_input=name == "input_layernorm",
                is_wide=find_family(config.model_type).model_type in _WIDE_NORMS,
            )


def _read_memory(config: Any, layer: Any) -> Memory:
    options = config.memory_config
    heads = config.num_attention_heads
    width = config.hidden_size // heads
    memory = layer.memory
    return Memory(
        kind=options.kind,
        values=options.values,
        num_heads=heads,
        num_subkeys=options.num_subkeys,
        top_k=options.top_k,
        attended=attended_dim(config, options.attn_output_proj),
        head_width=width,
        latent_dim=options.latent_dim or width,
        hidden=config.hidden_size,
        has_query_proj=bool(options.query_proj),
        has_query_norm=options.query_norm != "none",
        has_output_proj=options.memory_output_proj,
        bypass=options.bypass,
        has_residual=bool(options.attention_residual),
        has_attention_proj=bool(options.attn_output_proj),
        key_params=sum(p.numel() for p in memory.keys.parameters()),
        value_params=sum(p.numel() for p in memory.values.parameters()),
    )

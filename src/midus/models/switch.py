"""Memory blocks switched off, or turned down, while their weights stay.

A memory block adds a correction to its input (Eq. 2), so without the corrections an up-scaled
model is its base. Each block multiplies its correction by a gate, 1 unless told otherwise; at 0 it
returns its input and computes nothing. Keys and values of later tokens depend on the gates, so a KV
cache remembers which ones it was filled with and is refused under others.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from midus.errors import MidusError
from midus.memory.bypass import Bypass

Gates = tuple[tuple[int, float], ...]
"""Positions whose gate is not 1, and their gates; empty for a model that is wholly on."""

_LOCK = threading.Lock()


class MemorySwitch:
    """What decoder and causal LM offer; the state is the decoder's, shared by both."""

    _chosen_gates: Gates = ()  # as set by hand
    _active_gates: Gates = ()  # those, and 0 for what is disabled
    _disabled: tuple[int, ...] = ()  # a position once for each open `memory_disabled`

    @contextmanager
    def memory_disabled(self, positions: Iterable[int] | None = None) -> Iterator[None]:
        """While open, memory blocks return their input: with all of them off, the base's logits.

        It can be nested, and an exception ends it too. The state belongs to this model object:
        all threads that call it see it, so open and close it between calls, not during one. A
        copy or pickle made meanwhile has its memory on. A KV cache filled inside is refused
        outside, and the other way round; an empty one serves both.

        Args:
            positions: Blocks to disable, as ``config.memory_positions`` has them; default: all.
        """
        decoder: Any = self.base_model  # type: ignore[attr-defined]  # PreTrainedModel's
        blocks = decoder._memory_blocks()
        chosen = tuple(blocks) if positions is None else _checked(positions, blocks)
        with _LOCK:
            decoder._disabled += chosen
            decoder._apply_gates()
        try:
            yield
        finally:
            with _LOCK:
                left = list(decoder._disabled)
                for position in chosen:
                    left.remove(position)
                decoder._disabled = tuple(left)
                decoder._apply_gates()

    def set_memory_gates(self, gates: Mapping[int, float]) -> None:
        """Multiplies the corrections of blocks by these numbers from 0 to 1; all others by 1.

        ``set_memory_gates({})`` is the model as trained. Gates are no weights: copies have them,
        checkpoints do not, until they are folded. Inside ``memory_disabled`` they wait for its end.

        Args:
            gates: A gate for each position that shall have one other than 1.
        """
        decoder: Any = self.base_model  # type: ignore[attr-defined]
        if not isinstance(gates, Mapping):
            raise MidusError(f"gates={gates!r} must be a dict of numbers by position")
        chosen = [
            (position, _checked_gate(position, gates[position]))
            for position in _checked(gates, decoder._memory_blocks())
        ]
        with _LOCK:
            decoder._chosen_gates = tuple(chosen)
            decoder._apply_gates()

    def fold_memory_gates(self) -> None:
        """Makes the gates part of the weights, for good: a checkpoint then has them.

        Values and bypass of each block, where they are joined the bypass alone, are multiplied by
        its gate, which is 1 afterwards.
        """
        decoder: Any = self.base_model  # type: ignore[attr-defined]
        with _LOCK:
            if decoder._disabled:
                raise MidusError(
                    "gates cannot be folded while memory is disabled; leave memory_disabled first"
                )
            blocks = decoder._memory_blocks()
            gated = {blocks[position]: gate for position, gate in decoder._chosen_gates}
            if any(weight.is_meta for block in gated for weight in block.parameters()):
                raise MidusError(
                    "gates cannot be folded into weights that are offloaded; load the model whole"
                )
            if any(type(block.bypass) not in (Bypass, type(None)) for block in gated):
                raise MidusError(
                    "gates cannot be folded while an adapter is beside a bypass; merge it first"
                )
            for block, gate in gated.items():
                block.scale_correction(gate)
            decoder._chosen_gates = ()
            decoder._apply_gates()

    @property
    def memory_gates(self) -> dict[int, float]:
        """The gate of each memory block by position; 0 for what is disabled at present."""
        decoder: Any = self.base_model  # type: ignore[attr-defined]
        return {position: block.gate for position, block in decoder._memory_blocks().items()}

    def _apply_gates(self) -> None:
        """To be called on the decoder, after a change."""
        blocks = self._memory_blocks()  # type: ignore[attr-defined]  # the decoder's
        gates = {**dict.fromkeys(blocks, 1.0), **dict(self._chosen_gates)}
        gates.update(dict.fromkeys(self._disabled, 0.0))
        self._active_gates = tuple((place, gate) for place, gate in gates.items() if gate != 1.0)
        for position, block in blocks.items():
            block.gate, block.model_gates = gates[position], self._active_gates


def gates_of(model: Any) -> Gates:
    """A model's gates at present; empty for one without memory blocks."""
    return getattr(model.base_model, "_active_gates", ())


def guard_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decoder's ``forward`` that refuses a cache of another state before anything runs."""
    place = list(inspect.signature(forward).parameters).index("past_key_values") - 1

    @functools.wraps(forward)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = args[place] if len(args) > place else kwargs.get("past_key_values")
        if cache is not None:
            refuse_other_gates(cache, self._active_gates)
        return forward(self, *args, **kwargs)

    return guarded


def refuse_other_gates(cache: Any, gates: Gates) -> None:
    """Raises unless a cache was filled under these gates or is empty.

    Only where they differ is the cache looked into: a static one keeps its length on the device.
    """
    filled = getattr(cache, "midus_gates", ())
    if filled == gates:
        return
    if not all(_is_empty(layer) for layer in cache.layers):
        raise MidusError(
            f"this KV cache was filled with {_told(filled)}, and the model has {_told(gates)}; use "
            "it in the state that filled it, or start an empty one"
        )
    mark_cache(cache, gates)


def mark_cache(cache: Any, gates: Gates) -> None:
    """Writes down under which gates a cache is filled. One without a mark: all at 1."""
    cache.midus_gates = gates


def hold_slots(attention: Any, hidden_states: Tensor, cache: Any) -> None:
    """Counts tokens in a block's part of the cache without computing their keys and values.

    Masks and positions are made from the length of one layer, which may be this one. What is held
    is never read: the block is off whenever the cache is accepted.
    """
    shape = (len(hidden_states), attention.config.num_key_value_heads, hidden_states.shape[1])
    nothing = hidden_states.new_zeros(()).expand(*shape, attention.head_dim)
    cache.update(nothing, nothing, attention.layer_idx)


def _is_empty(layer: Any) -> bool:
    """Whether a cache's layer holds no token, or only zeros: ``reset`` of a growing one."""
    return (
        not layer.is_initialized
        or not layer.get_seq_length()
        or (type(layer) is DynamicLayer and not cast("Tensor", layer.keys).any())
    )


def _checked(positions: Any, blocks: Mapping[int, Any]) -> tuple[int, ...]:
    """Positions, each once; refuses what is no list of memory blocks."""
    if isinstance(positions, str | int) or not isinstance(positions, Iterable):
        raise MidusError(f"positions={positions!r} is no list; give one such as {[*blocks][:2]}")
    chosen = tuple(dict.fromkeys(positions))
    for position in chosen:
        if position not in blocks:
            raise MidusError(
                f"position {position!r} is no memory block of this model; they are at {[*blocks]}"
            )
    return chosen


def _checked_gate(position: int, gate: Any) -> float:
    if not isinstance(gate, int | float) or not 0 <= gate <= 1:
        raise MidusError(
            f"gate {gate!r} at position {position} is no number from 0 to 1; give 0 for a block "
            "that is off, 1 for one as trained"
        )
    return float(gate)


def _told(gates: Gates) -> str:
    return f"memory gates {dict(gates)}" if gates else "all memory on"

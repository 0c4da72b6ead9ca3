"""Fast generation: a static cache, and one captured CUDA graph a token.

Eager decoding of a large model spends its time launching kernels. Here the step of one token is
captured once and replayed, with blocks fused (`fused.py`, `fused_base.py`) and value caches. Any
causal language model of a supported family can be decoded so, with memory blocks or without.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import StaticLayer

from midus.errors import MidusError
from midus.models.captured_attention import token_attention, why_not_captured
from midus.models.fused_base import fused_blocks
from midus.models.switch import Gates, gates_of, mark_cache, refuse_other_gates
from midus.ops.streams import side_stream

# What `generate` may be told that one graph a token cannot do.
_UNSUITED = {
    "num_beams": 1,
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "return_dict_in_generate": False,
    "past_key_values": None,
    "inputs_embeds": None,
    "cache_implementation": None,
    "prefill_chunk_size": None,
    "use_cache": True,
    "penalty_alpha": None,
    "dola_layers": None,
    "custom_generate": None,
    "synced_gpus": False,
    "stop_strings": None,
    "token_healing": False,
    "assistant_early_exit": None,
}


class FastDecoder:
    """Decodes a batch token by token over a static cache; on a CUDA device by graph replay.

    Args:
        model: A causal language model in evaluation mode, on one device.
        batch_size: Sequences decoded together.
        max_length: Tokens of a sequence, the prompt's included.
    """

    def __init__(self, model: Any, batch_size: int, max_length: int) -> None:
        reason = _why_not(model)
        if reason and model.device.type == "cuda":
            raise MidusError(f"this model cannot be decoded by graphs: {reason}")
        self._model, self.max_length = model, max_length
        self._cache: Any = StaticCache(config=model.config, max_cache_len=max_length)
        device = model.device
        self._ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._length = torch.zeros((), dtype=torch.long, device=device)
        self._slots = torch.arange(max_length, device=device)
        self._real = torch.ones(batch_size, 1, 1, max_length, dtype=torch.bool, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = self._captured = torch.empty(0)
        self._tables: list[Tensor | None] = []
        self._gates: Gates = ()
        self._filled = 0

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Reads prompts ``[B, T]``; logits ``[B, vocabulary]`` of their last tokens.

        Args:
            input_ids: The prompts, padded on the left if at all.
            attention_mask: What is no padding, ``[B, T]``.
            position_ids: Positions, ``[B, T]``; by default those of the tokens that are no padding.
        """
        length = input_ids.shape[1]
        if input_ids.shape[0] != len(self._ids) or length >= self.max_length:
            raise MidusError(
                f"prompts of shape {tuple(input_ids.shape)} do not fit a decoder of "
                f"{len(self._ids)} sequences of {self.max_length} tokens; make a larger one"
            )
        positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        if position_ids is not None:
            positions = position_ids.expand_as(input_ids)
        elif attention_mask is not None:
            positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)
        if [*map(id, self._tables)] != [*map(id, _value_tables(self._model))]:
            self._graph = None  # it reads tables that are gone or old
        if self._gates != gates_of(self._model):
            self._graph = None  # it was captured with other memory blocks on
        self._gates = gates_of(self._model)
        # A growing cache lets attention use its fastest kernel; then it is copied.
        read: Any = DynamicCache(config=self._model.config)
        out = self._model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=read,
            use_cache=True,
            logits_to_keep=1,
        )
        for layer, filled in zip(self._cache.layers, read.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(filled.keys, filled.values)
            layer.keys[:, :, :length] = filled.keys
            layer.values[:, :, :length] = filled.values
            layer.cumulative_length.fill_(length)
            filled.keys = filled.values = None
        mark_cache(self._cache, self._gates)
        self._real.fill_(True)
        if attention_mask is not None:
            self._real[:, 0, 0, :length] = attention_mask.bool()
        self._positions.copy_(positions[:, -1:] + 1)
        self._length.fill_(length)
        self._filled = length
        self._logits = out.logits[:, -1].float()
        return self._logits

    @torch.no_grad()
    def step(self, ids: Tensor | None = None) -> Tensor:
        """Reads one more token a sequence, by default the likeliest; logits as ``prefill``'s.

        The result is overwritten by the next step. Nothing waits for the device.
        """
        if not 0 < self._filled < self.max_length:
            raise MidusError(
                f"{self._filled} of {self.max_length} tokens are in the decoder's cache; prefill "
                "it first, and make it long enough for what is to come"
            )
        refuse_other_gates(self._cache, gates_of(self._model))  # a graph would not ask
        self._ids.copy_((self._logits.argmax(-1) if ids is None else ids).view(-1, 1))
        self._filled += 1
        if not self._is_graphed:
            self._logits = self._forward()
            return self._logits
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        self._logits = self._captured
        return self._logits

    @property
    def _is_graphed(self) -> bool:
        return bool(self._model.device.type == "cuda")

    @property
    def cache_bytes(self) -> int:
        """What keys and values take."""
        return sum(
            tensor.numel() * tensor.itemsize
            for layer in self._cache.layers
            if layer.is_initialized
            for tensor in (layer.keys, layer.values)
        )

    def _forward(self) -> Tensor:
        seen = (self._slots <= self._length) & self._real  # [B, 1, 1, L]
        with fused_blocks(self._model), token_attention(self._model):
            out = self._model(
                input_ids=self._ids,
                attention_mask=seen,
                position_ids=self._positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
                cached_length=self._length,
            )
        self._positions.add_(1)
        self._length.add_(1)
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Records one step. Two real ones come first, for what is made at first calls."""
        self._tables = _value_tables(self._model)  # held, as the graph reads them
        counters = [self._positions, self._length]
        counters += [layer.cumulative_length for layer in self._cache.layers]
        before = [counter.clone() for counter in counters]
        stream = side_stream(self._ids.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward()
                for counter, value in zip(counters, before, strict=True):
                    counter.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._captured = self._forward()
        return graph


def _value_tables(model: Any) -> list[Tensor | None]:
    """The value caches a graph would read, where the model has memories with such."""
    values = model._hive_values() if hasattr(model, "_hive_values") else []
    return [value.fresh_cache() for value in values]


def generate_fast(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """``model.generate`` by graph replay: greedy or sampling, the same arguments and tokens.

    Where that cannot be done (no CUDA device, beams, sliding windows, ...) one warning says why
    and the plain ``generate`` runs. Sampling may draw one more number after the end.
    """
    names = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
    kwargs.update(zip(names, args, strict=False))
    reason = _why_not(model) or _why_not_asked(model, kwargs)
    if reason:
        warnings.warn(f"generating without CUDA graphs: {reason}", stacklevel=2)
        plain: Tensor = model.generate(**kwargs)
        return plain
    kwargs.pop("custom_generate", None)
    # A streamer gets the prompt from `generate`, which does not hand it on to loops of others.
    loop = functools.partial(_decode, streamer=kwargs.get("streamer"))
    result: Tensor = model.generate(custom_generate=loop, **kwargs)
    return result


class Difference(NamedTuple):
    """Where two greedy decodings part."""

    token: int
    """Which of the new tokens."""
    margin: float
    """By how much the plain path prefers its own token to the other, in log-probability."""


def first_difference(model: Any, input_ids: Tensor, max_new_tokens: int) -> Difference | None:
    """Decodes one prompt greedily both ways; None if all tokens that both made are the same.

    Args:
        model: A causal language model.
        input_ids: ``[1, T]``.
        max_new_tokens: How far to compare.
    """
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    plain = model.generate(input_ids, **options)[0, input_ids.shape[1] :]
    fast = generate_fast(model, input_ids, **options)[0, input_ids.shape[1] :]
    common = min(len(plain), len(fast))
    differing = (plain[:common] != fast[:common]).nonzero()
    if not len(differing):
        return None
    token = int(differing[0])
    with torch.no_grad():
        text = torch.cat([input_ids[0], plain[:token]]).unsqueeze(0)
        scores = model(text, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
    return Difference(token, float(scores[plain[token]] - scores[fast[token]]))


def _decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Callable[..., Tensor],
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """The loop of `generate` around the graph; it reads each stop flag one step late."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None and bool(mask.all()):
        mask = None
    end = generation_config.max_length
    decoder = FastDecoder(model, len(input_ids), end)
    pad = generation_config._pad_token_tensor
    has_eos = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
    unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    late = _LateFlag(input_ids.device)
    logits = decoder.prefill(input_ids, mask, model_kwargs.get("position_ids"))
    while True:
        scores = logits_processor(input_ids, logits.clone())
        if generation_config.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        if has_eos:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~stopping_criteria(input_ids, None)
        if late.exchange(unfinished.max() == 0):
            input_ids = input_ids[:, :-1]  # made after the end
            break
        if streamer is not None:
            streamer.put(tokens.cpu())
        if input_ids.shape[1] >= end:
            break
        logits = decoder.step(tokens)
    if streamer is not None:
        streamer.end()
    return input_ids


class _LateFlag:
    """Whether a condition held one step ago: asking for the present one would stall the device."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._flags = [torch.zeros((), dtype=torch.bool, pin_memory=is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(2)]
        self._is_first = True

    def exchange(self, flag: Tensor) -> bool:
        """Hands in the present one and gets the one before."""
        self._flags.reverse()
        self._events.reverse()
        self._flags[0].copy_(flag, non_blocking=True)
        if self._events[0] is not None:
            self._events[0].record()
        if self._is_first:
            self._is_first = False
            return False
        if self._events[1] is not None:
            self._events[1].synchronize()
        return bool(self._flags[1])


def _why_not(model: Any) -> str:
    """What about the model keeps graphs from it; empty if nothing does."""
    reason = why_not_captured(model)
    if reason:
        return reason
    if model.training:
        return "the model is in training mode; call eval() first"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is spread over several devices"
    layers = StaticCache(config=model.config, max_cache_len=1).layers
    if any(type(layer) is not StaticLayer for layer in layers):
        return "some of its blocks attend to a window only"
    return ""


def _why_not_asked(model: Any, kwargs: dict[str, Any]) -> str:
    """Which of ``generate``'s arguments does, or of the settings that stand in for them."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    for name, plain in _UNSUITED.items():
        said = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        asked = next((value for value in said if value is not None), None)
        if asked is not None and asked != plain:
            shown = f"={asked!r}" if isinstance(asked, bool | int | str) else ""
            return f"{name}{shown} was asked for"
    return ""

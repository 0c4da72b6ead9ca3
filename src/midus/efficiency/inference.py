"""Prefill and decoding of one model: milliseconds, tokens a second and peak memory."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteria

from midus.efficiency.gpu_memory import peak_gb, start_peak
from midus.efficiency.timing import time_runs

_LONG_PROMPT, _LONG_RUNS = 16384, 3


def prepare_inference(model: Any) -> None:
    """Evaluation mode, with the value caches that every inference figure of the paper has."""
    model.eval()
    if hasattr(model, "build_value_cache"):
        model.build_value_cache()


def finish_inference(model: Any) -> None:
    """Frees the value caches."""
    if hasattr(model, "drop_value_cache"):
        model.drop_value_cache()


def random_prompt(model: Any, batch: int, length: int, device: torch.device) -> Tensor:
    """Random tokens, ``[batch, length]``."""
    return torch.randint(model.config.vocab_size, (batch, length), device=device)


@torch.no_grad()
def warm_up(model: Any, prompt: int, device: torch.device) -> None:
    """Reads a prompt of that many tokens, untimed."""
    model(input_ids=random_prompt(model, 1, prompt, device), use_cache=True, logits_to_keep=1)


@torch.no_grad()
def measure_prefill(
    model: Any, prompt: int, device: torch.device, warmup: int, runs: int
) -> dict[str, Any]:
    """From a prompt to its next token, into a fresh cache each time."""
    start_peak(device)
    input_ids = random_prompt(model, 1, prompt, device)

    def prefill() -> Tensor:
        logits = model(input_ids=input_ids, use_cache=True, logits_to_keep=1).logits
        token: Tensor = logits[:, -1].argmax(-1)
        return token

    if prompt >= _LONG_PROMPT:
        runs, warmup = min(runs, _LONG_RUNS), min(warmup, 1)
    seconds = time_runs(prefill, device, runs, warmup)
    return {
        "ms": statistics.median(seconds) * 1e3,
        "spread_ms": (max(seconds) - min(seconds)) * 1e3,
        "gb": peak_gb(device),
    }


@torch.no_grad()
def kv_cache_bytes(model: Any, length: int, device: torch.device) -> int:
    """Bytes of the keys and values of one sequence."""
    input_ids = random_prompt(model, 1, length, device)
    cache = model(input_ids=input_ids, use_cache=True, logits_to_keep=1).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class Rate(NamedTuple):
    """Tokens a second of all sequences together."""

    median: float
    spread: float
    """Largest less smallest."""
    runs: list[float]
    """Of every repeat."""


def _rate(tokens: int, seconds: list[float]) -> Rate:
    rates = [tokens / second for second in seconds]
    return Rate(statistics.median(rates), max(rates) - min(rates), rates)


class _TokenClock(StoppingCriteria):
    """Takes the time after each token; asked whether to stop, it says no."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def seconds(self, start: int) -> float:
        """From the token of that number to the last."""
        first, last = self._marks[start], self._marks[-1]
        if not self._is_cuda:
            return float(last - first)
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def measure_generate(
    generate: Callable[..., Any],
    input_ids: Tensor,
    tokens: int,
    repeats: int,
    device: torch.device,
) -> Rate:
    """Greedy generation, as often as ``repeats`` says after one warm-up."""
    generate_once(generate, input_ids, tokens, device)
    seconds = [generate_once(generate, input_ids, tokens, device) for _ in range(repeats)]
    return _rate(tokens * len(input_ids), seconds)


def generate_once(
    generate: Callable[..., Any], input_ids: Tensor, tokens: int, device: torch.device
) -> float:
    """Seconds of one greedy generation, from the second token to the last.

    So neither prefill nor the capture of a graph, which comes before the second token, counts.

    Args:
        generate: ``model.generate`` or what takes the same arguments.
        input_ids: The prompts.
        tokens: Tokens that are timed, of each sequence.
        device: Where it runs.
    """
    clock = _TokenClock(device)
    made = generate(
        input_ids=input_ids,
        max_new_tokens=tokens + 2,
        min_new_tokens=tokens + 2,
        do_sample=False,
        stopping_criteria=[clock],
    )
    assert made.shape[1] == input_ids.shape[1] + tokens + 2
    return clock.seconds(1)


@torch.no_grad()
def measure_generation_memory(
    model: Any, prompt: int, tokens: int, device: torch.device
) -> float | None:
    """Peak memory of one eager generation, prefill included."""
    start_peak(device)
    input_ids = random_prompt(model, 1, prompt, device)
    model.generate(
        input_ids=input_ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    return peak_gb(device)


@torch.no_grad()
def measure_decoder(
    model: Any, input_ids: Tensor, tokens: int, repeats: int, warmup: int, device: torch.device
) -> Rate:
    """Replayed steps over a static cache (`models/fast.py`)."""
    from midus.models.fast import FastDecoder

    batch, prompt = input_ids.shape
    decoder = FastDecoder(model, batch, prompt + warmup + repeats * tokens + 1)
    decoder.prefill(input_ids)
    for _ in range(warmup):
        decoder.step()

    def steps() -> None:
        for _ in range(tokens):
            decoder.step()

    return _rate(tokens * batch, time_runs(steps, device, repeats))


@torch.no_grad()
def measure_hf_compiled(
    model: Any, input_ids: Tensor, tokens: int, repeats: int, warmup: int, device: torch.device
) -> Rate:
    """The compiled step of transformers itself, over its static cache.

    What ``generate(cache_implementation="static")`` runs for each token, without its bookkeeping.
    """
    from transformers import CompileConfig, StaticCache

    batch, prompt = input_ids.shape
    length = prompt + warmup + repeats * tokens + 1
    cache = StaticCache(config=model.config, max_cache_len=length)
    model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    compiled = model.get_compiled_call(CompileConfig())
    ids = input_ids[:, :1].clone()

    def steps(count: int = tokens) -> None:
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids.copy_(out.logits[:, -1:].argmax(-1))

    steps(warmup)
    rate = _rate(tokens * batch, time_runs(steps, device, repeats))
    torch.compiler.reset()  # frees its graphs
    return rate

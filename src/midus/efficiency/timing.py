"""How long a function takes on its device: a kernel from cold caches, or a model's whole run."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# More than any GPU's L2: writing it leaves nothing of a run's data in the cache.
_FLUSH_BYTES = 256 << 20


class Timer:
    """Times functions on one device.

    On a CUDA device the time between two events, each run after the L2 cache was overwritten, so
    that weights and inputs come from memory as they do inside a model. ``eager`` launches from
    Python as users do: where launches take longer than the kernels, they are what is timed, less
    the time that overwriting the cache gives Python to run ahead. ``graph`` replays a
    captured CUDA graph, which leaves the kernels alone. On a CPU there is the wall clock only.
    """

    def __init__(self, device: torch.device, runs: int = 30) -> None:
        self.device = device
        self.runs = runs
        self.has_graphs = device.type == "cuda"
        size = _FLUSH_BYTES if device.type == "cuda" else 0
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def eager(self, function: Callable[[], Any]) -> float:
        """Median milliseconds of a call."""
        for _ in range(3):
            function()
        if self.device.type == "cpu":
            return self._wall_clock(function)
        return self._events(function)

    def graph(self, function: Callable[[], Any]) -> float:
        """Median milliseconds of a replay of the captured call, on a CUDA device."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return self._events(graph.replay)

    def bandwidth(self) -> float:
        """Bytes a second of a copy on the device, read and written ones together."""
        source = torch.empty_like(self._flush).new_empty(max(self._flush.numel(), 1 << 26) * 4)
        target = torch.empty_like(source)
        return 2 * source.numel() / (self.eager(lambda: target.copy_(source)) / 1e3)

    def _events(self, function: Callable[[], Any]) -> float:
        pairs = []
        for _ in range(self.runs):
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs))

    def _wall_clock(self, function: Callable[[], Any]) -> float:
        times = []
        for _ in range(min(self.runs, 5)):
            started = time.perf_counter()
            function()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)


def forward_backward(
    function: Callable[..., Tensor], inputs: Iterable[Tensor], grad: Tensor, *options: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs ``function(*inputs, *options)`` on fresh leaves and all its gradients."""

    def run() -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*leaves, *options), leaves, grad)

    return run


def time_runs(
    function: Callable[[], Any], device: torch.device, runs: int, warmup: int = 0
) -> list[float]:
    """Seconds of each run: between CUDA events, or by the wall clock on a CPU."""
    for _ in range(warmup):
        function()
    seconds = []
    for _ in range(runs):
        if device.type != "cuda":
            started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - started)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds

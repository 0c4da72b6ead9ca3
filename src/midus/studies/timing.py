"""How long training takes without evaluations, and when a study must stop."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Steps that compile kernels and warm up caches, each time a trial begins or goes on.
WARM_STEPS = 3


class Deadline:
    """The end of the time a command was given; without a limit it comes when it is told to."""

    def __init__(
        self, seconds: float | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds
        self.was_told = False
        """Whether ``end`` was called, before or after the time was up."""

    @property
    def has_limit(self) -> bool:
        return self._end is not None

    def is_past(self) -> bool:
        return self.was_told or (self._end is not None and self._clock() >= self._end)

    def end(self) -> None:
        """Time is up now."""
        self.was_told = True

    @property
    def reason(self) -> str:
        """Why it is past, for messages."""
        return "as told" if self.was_told else "time is up"


class Pace:
    """Keeps this process at most one step ahead of the device, so that it can stop in time.

    Steps are launched without waiting, and minutes of them can be on their way when time is up.

    Args:
        is_kept: Whether to wait at all.
        make_event: What marks the end of a step on the device.
    """

    def __init__(self, is_kept: bool, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._is_kept, self._make_event = is_kept, make_event
        self._last: Any = None

    def step(self) -> None:
        """A step has been launched; waits for the one before it."""
        if not self._is_kept:
            return
        event = self._make_event()
        event.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = event


class Stopwatch:
    """Counts tokens and the seconds their steps take, pauses and first steps left out."""

    def __init__(self, device: torch.device, tokens: int = 0, seconds: float = 0.0) -> None:
        self._device = device
        self._steps = 0
        self._began: float | None = None
        self.tokens, self.seconds = tokens, seconds

    def count(self, tokens: int) -> None:
        """A step is over."""
        self._steps += 1
        if self._steps > WARM_STEPS:
            self.tokens += tokens
        elif self._steps == WARM_STEPS:
            self._start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count."""
        self.stop()
        yield
        if self._steps >= WARM_STEPS:
            self._start()

    def stop(self) -> None:
        """Adds what has passed; the device is waited for."""
        if self._began is not None:
            self.seconds += self._now() - self._began
            self._began = None

    def rate(self) -> float | None:
        """Tokens a second; None where there were too few steps to tell."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    def _start(self) -> None:
        self._began = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

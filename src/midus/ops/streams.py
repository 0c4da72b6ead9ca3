"""Work beside the main stream: for short kernels that would leave the device idle on their own."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Beside:
    """A side stream of one device; on a CPU everything simply runs in order.

    Args:
        device: Where the work is.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._main, self._side = torch.cuda.current_stream(device), side_stream(device)

    def run(self, function: Callable[..., T], *args: object) -> T:
        """``function(*args)`` on the side stream, after all that the main stream has so far."""
        if not self._is_cuda:
            return function(*args)
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            return function(*args)

    def join(self, *results: Tensor) -> None:
        """Lets the main stream wait for the side; tensors it goes on with are named here."""
        if self._is_cuda:
            self._main.wait_stream(self._side)
            for tensor in results:
                tensor.record_stream(self._main)  # made on the side, freed on the main stream


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: every stream has memory of its own that libraries keep for it."""
    return torch.cuda.Stream(device)

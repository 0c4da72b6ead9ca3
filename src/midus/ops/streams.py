"""Work beside the main stream: for short kernels that would leave the device idle on their own."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def start_beside(
    function: Callable[..., tuple[Tensor, ...]], tensor: Tensor, *args: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """Starts ``function(tensor, *args)`` on a side stream of the tensor's device.

    Args:
        function: Launches work and returns fresh tensors.
        tensor: Its first argument, ready on the current stream; keep it until the result is here.
        *args: Further arguments.

    Returns:
        A call that lets the current stream wait for the work and gives its tensors.
    """
    if not tensor.is_cuda:
        result = function(tensor, *args)
        return lambda: result
    main, side = torch.cuda.current_stream(tensor.device), _side_stream(tensor.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = function(tensor, *args)

    def wait() -> tuple[Tensor, ...]:
        main.wait_stream(side)
        for made in result:
            made.record_stream(main)  # made on the side, freed on the main stream
        return result

    return wait


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

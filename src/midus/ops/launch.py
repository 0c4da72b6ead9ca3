"""Launches Triton kernels without paying Triton's own argument handling at every call.

`kernel[grid](...)` binds and inspects every argument anew, and our kernels have two dozen. A
kernel once compiled can be launched directly, as Triton's fused-softmax tutorial does; all that is
left is to tell which compiled kernel fits. On NVIDIA GPUs its launcher gets addresses in place of
tensors: it would ask each tensor for its own, and the driver about each address.
"""

import functools
import inspect
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor


class Constants(dict[str, Any]):
    """Compile-time constants of a kernel, made once for given sizes and kept.

    Told apart by which they are, not by what they hold: looking a kernel up need not read them.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__


# Compiled kernels, how to launch each with addresses, and their constants, in the order of the
# signature.
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...] | None, tuple[Any, ...]]] = {}

_NUMBERS = frozenset({int, float})
_address, _dtype, _is_on_gpu = Tensor.data_ptr, attrgetter("dtype"), attrgetter("is_cuda")


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """``kernel[grid](*args, **constants)`` on the device of the first argument.

    Args:
        kernel: A ``triton.jit`` function whose compile-time constants come last.
        grid: One to three numbers of programs.
        args: Tensors, then numbers, the kernel's first arguments.
        constants: Its compile-time constants by name, and ``num_warps`` and the like; ``Constants``
            that are the same object each time are found faster.
    """
    index = args[0].get_device()  # -1 on a CPU
    if index >= 0 and index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            launch(kernel, grid, args, constants)
        return
    count = len(args)
    while type(args[count - 1]) in _NUMBERS:
        count -= 1
    tensors, numbers = args[:count], args[count:]
    # Asked anew at every call: a weight may have moved since the last one.
    addresses = [*map(_address, tensors)]
    # All that Triton makes a compiled kernel depend on, and a little more. No function of its own:
    # calling it for two dozen arguments would take longer than what it does.
    key = (
        id(kernel),
        index,
        constants if type(constants) is Constants else tuple(constants.items()),
        *map(_dtype, tensors),
        functools.reduce(or_, addresses) % 16 == 0
        or tuple([address % 16 == 0 for address in addresses]),
        *[
            None
            if type(number) is float
            else number % 16 == 0
            if 1 < number < 1 << 31
            else (number == 1, number % 16 == 0, number >= 1 << 31)
            for number in numbers
        ],
    )
    known = _COMPILED.get(key)
    if known is None:
        compiled = kernel[grid](*args, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            names = kernel.arg_names[count + len(numbers) :]
            values = tuple([constants[name] for name in names])
            _COMPILED[key] = compiled, _direct(compiled), values
        return
    compiled, direct, values = known
    x, y, z = (*grid, 1, 1)[:3]
    # A tensor on a CPU is refused by Triton; its address would be read.
    if direct is None or not all(map(_is_on_gpu, tensors)) or _has_hooks(direct[0]):
        compiled[x, y, z](*args, *values)
        return
    _, run, function, metadata = direct
    stream = torch._C._cuda_getCurrentRawStream(index)
    # The tensors live at least until this returns: ``args`` holds them.
    run(x, y, z, stream, function, metadata, None, None, None, *addresses, *numbers, *values)


# What `CompiledKernel.__getitem__` must contain, as it does in Triton 3.6 and 3.9, for `launch` to
# be allowed to do the same.
_KNOWN_CALL = (
    "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, "
    "launch_metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)"
)


def _direct(compiled: Any) -> tuple[Any, ...] | None:
    """What launches a compiled kernel by addresses; None where Triton is not the one we know."""
    knobs = _known_knobs(compiled.__class__)
    if knobs is None or not type(compiled.run).__module__.startswith("triton.backends.nvidia."):
        return None
    return knobs, compiled.run, compiled.function, compiled.packed_metadata


@functools.cache
def _known_knobs(compiled_class: Any) -> Any:
    """Triton's settings, which hold its hooks, if it launches as written above."""
    try:
        from triton import knobs

        source = inspect.getsource(compiled_class.__getitem__)
    except (ImportError, AttributeError, OSError, TypeError):
        return None
    return knobs if _KNOWN_CALL in " ".join(source.split()) else None


def _has_hooks(knobs: Any) -> bool:
    """Whether a profiler wants to hear of launches; Triton's chains of hooks may be empty."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

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
    _, run, fixed = direct
    stream = torch._C._cuda_getCurrentRawStream(index)
    # The tensors live at least until this returns: ``args`` holds them.
    run(x, y, z, stream, *fixed, *addresses, *numbers, *values)


# What `CompiledKernel.__getitem__` must contain, as it does in Triton 3.6 and 3.9, for `launch` to
# be allowed to do the same; and its launcher, as it does in 3.6, to go past that as well.
_KNOWN_CALL = (
    "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, "
    "launch_metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)"
)
_KNOWN_LAUNCH = (
    "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, "
    "self.launch_pdl, global_scratch, profile_scratch, *args)"
)


def _direct(compiled: Any) -> tuple[Any, ...] | None:
    """What launches a compiled kernel by addresses; None where Triton is not the one we know.

    Triton's settings, which hold its hooks; a function; what it gets between stream and addresses.
    """
    if not _has_line(compiled.__class__, "__getitem__", _KNOWN_CALL):
        return None
    from triton import knobs

    launcher, function = compiled.run, compiled.function
    if not type(launcher).__module__.startswith("triton.backends.nvidia."):
        return None
    unhooked = (compiled.packed_metadata, None, None, None)
    if (
        not _has_line(launcher.__class__, "__call__", _KNOWN_LAUNCH)
        or launcher.global_scratch_size
        or launcher.profile_scratch_size
    ):
        return knobs, launcher, (function, *unhooked)
    without_scratch = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
    return knobs, launcher.launch, (function, *without_scratch, *unhooked)


@functools.cache
def _has_line(owner: Any, method: str, line: str) -> bool:
    """Whether the source of a method has a line, however it is broken."""
    try:
        source = inspect.getsource(getattr(owner, method))
    except (AttributeError, OSError, TypeError):
        return False
    return line in " ".join(source.split())


def _has_hooks(knobs: Any) -> bool:
    """Whether a profiler wants to hear of launches; Triton's chains of hooks may be empty."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

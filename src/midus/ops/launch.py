"""Launches Triton kernels without paying Triton's own argument handling at every call.

`kernel[grid](...)` binds and inspects every argument anew, and our kernels have two dozen. A
kernel once compiled can be launched directly, as Triton's fused-softmax tutorial does; all that is
left is to tell which compiled kernel fits.
"""

from typing import Any

import torch


class Constants(dict[str, Any]):
    """Compile-time constants of a kernel, made once for given sizes and kept.

    Told apart by which they are, not by what they hold: looking a kernel up need not read them.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__


# Compiled kernels and their constants, in the order of the signature.
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """``kernel[grid](*args, **constants)`` on the device of the first argument.

    Args:
        kernel: A ``triton.jit`` function whose compile-time constants come last.
        grid: One to three numbers of programs.
        args: Tensors and numbers, the kernel's first arguments.
        constants: Its compile-time constants by name, and ``num_warps`` and the like; ``Constants``
            that are the same object each time are found faster.
    """
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, args, constants)
        return
    fixed = constants if type(constants) is Constants else tuple(constants.items())
    # All that Triton makes a compiled kernel depend on, and a little more. No function of its own:
    # calling it for two dozen arguments would take longer than what it does.
    kinds = [
        (arg == 1) + 2 * (arg % 16 == 0) + 4 * (arg >= 1 << 31)
        if type(arg) is int
        else None
        if type(arg) is float
        else arg.dtype
        if arg.data_ptr() % 16 == 0
        else (arg.dtype,)
        for arg in args
    ]
    key = (id(kernel), device.index, fixed, *kinds)
    known = _COMPILED.get(key)
    if known is not None:
        compiled, values = known
        compiled[(*grid, 1, 1)[:3]](*args, *values)
        return
    compiled = kernel[grid](*args, **constants)
    if compiled is not None:  # Triton's interpreter compiles nothing
        names = kernel.arg_names[len(args) :]
        _COMPILED[key] = compiled, tuple(constants[name] for name in names)

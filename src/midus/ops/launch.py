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
    key = (id(kernel), device.index, fixed, *map(_kind, args))
    known = _COMPILED.get(key)
    if known is not None:
        compiled, values = known
        compiled[(*grid, 1, 1)[:3]](*args, *values)
        return
    compiled = kernel[grid](*args, **constants)
    if compiled is not None:  # Triton's interpreter compiles nothing
        names = kernel.arg_names[len(args) :]
        _COMPILED[key] = compiled, tuple(constants[name] for name in names)


def _kind(arg: Any) -> Any:
    """All that Triton makes a compiled kernel depend on, and a little more."""
    if isinstance(arg, int):
        return (arg == 1) + 2 * (arg % 16 == 0) + 4 * (arg >= 1 << 31)
    if isinstance(arg, float):
        return None
    return (arg.dtype,) if arg.data_ptr() % 16 else arg.dtype

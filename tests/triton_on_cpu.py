"""Triton kernels on a CPU: its interpreter, with bfloat16 put right and half of its time saved.

Imported before anything imports Triton, which reads the variable when kernels are defined. On a
machine with a CUDA device the kernels run on it instead.
"""

import os

import torch

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


def mend_bfloat16() -> None:
    """Lets products of bfloat16 blocks be products, and casts round as a GPU's do.

    The interpreter keeps bfloat16 as its bits in uint16: it would multiply those, and it cuts off
    the lower half of a float32 instead of rounding to nearest even.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, widen(a), widen(b), *rest)

    def cast_impl(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            wide = torch.from_numpy(np.ascontiguousarray(source.data))
            bits = wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            return TensorHandle(bits, tl.bfloat16)
        return cast(self, source, target)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl


def patch_once() -> None:
    """Lets Triton's language be patched once for each function, and stay so.

    The interpreter goes through all names of the language at every call of a function from a
    kernel, and of `tl.sum` and its like, which takes longer than what they compute.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version's way of patching; slower, and right
    patch, patched = interpreter._patch_lang, set()

    def first_time(function):
        if function not in patched:
            patched.add(function)
            patch(function)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = first_time


if not HAS_CUDA:
    mend_bfloat16()
    patch_once()

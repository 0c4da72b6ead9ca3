"""Which of an op's implementations runs: its plain PyTorch reference or its Triton kernels.

Decided here and nowhere else. `backend="auto"` takes the kernels for CUDA tensors of 16 or 32 bits
(Ampere and later, NVIDIA) where Triton is installed, and the reference for everything else.
"""

import functools
import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from midus.errors import MidusError

Backend = Literal["auto", "reference", "triton"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_KERNEL_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


def takes_kernels(backend: str, *tensors: Tensor) -> bool:
    """Whether the kernels take these tensors; refuses a backend that cannot."""
    if backend == "reference":
        return False
    if backend not in ("auto", "triton"):
        raise MidusError(f"backend={backend!r} is unknown; choose auto, reference or triton")
    right_types = False not in [tensor.dtype in _KERNEL_TYPES for tensor in tensors]
    if backend == "auto":
        return _HAS_TRITON and right_types and tensors[0].is_cuda and _suits(tensors[0].device)
    if not _HAS_TRITON:
        raise MidusError("backend='triton' needs the package triton; install midus[triton]")
    if not right_types:
        wrong = next(t.dtype for t in tensors if t.dtype not in _KERNEL_TYPES)
        raise MidusError(
            f"backend='triton' got a {wrong} tensor, and the kernels take float16, bfloat16 and "
            "float32; use backend='reference'"
        )
    if not (tensors[0].is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise MidusError(
            f"backend='triton' got tensors on {tensors[0].device}; move them to a CUDA device, or "
            "use backend='auto'"
        )
    return True


def is_real(tensor: Tensor) -> bool:
    """Whether a kernel can be launched on it: no compiler's stand-in, no subclass."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def _suits(device: torch.device) -> bool:
    """Whether kernels are for this device and this call: not before Ampere, not in torch.func."""
    if torch.compiler.is_compiling():
        return True
    return _is_recent(device) and not torch._C._are_functorch_transforms_active()


@functools.cache
def _is_recent(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuses another shape: the kernels trust shapes, and would read memory that is not there."""
    if tensor.shape != shape:
        raise MidusError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")

"""Which device measurements run on, and its name for the report."""

import torch

from midus.errors import MidusError
from midus.reports import machine_name

_CPU = torch.device("cpu")


def pick_device(name: str) -> torch.device:
    """The device of that name; CUDA where there is one and none is named."""
    is_cuda = pick_device_type(name) == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else _CPU


def pick_device_type(name: str) -> str:
    """``cuda`` or ``cpu``, without taking memory of the device."""
    has_cuda = torch.cuda.is_available()
    if not name:
        name = "cuda" if has_cuda else "cpu"
    if name not in ("cuda", "cpu"):
        raise MidusError(f"device={name!r} is unknown; choose cuda or cpu")
    if name == "cuda" and not has_cuda:
        raise MidusError("device='cuda' was asked for, and PyTorch sees no CUDA device; use cpu")
    return name


def hardware_name(device: torch.device) -> str:
    """The accelerator, or the processor and its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine_name()

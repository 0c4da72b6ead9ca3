"""The most memory that tensors take at a time, phase by phase."""

import gc

import torch


def release(device: torch.device) -> None:
    """Frees what nothing refers to any more, on the device too."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one a stream, which would count in what follows
        torch.cuda.empty_cache()


def start_peak(device: torch.device) -> None:
    """Begins to watch the most memory that is taken at a time."""
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float | None:
    """The most memory tensors took since ``start_peak``, in 1e9 bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 1e9

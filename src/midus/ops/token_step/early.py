"""Kernels that begin before the one before them has ended (programmatic dependent launch)."""

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4: never called, see `early`
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def begin(EARLY: tl.constexpr):
    """Ends what may run before the kernel before this one has ended: reading weights.

    From here on its results are there, and the kernel after this one may begin likewise.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early(device: torch.device) -> dict[str, bool]:
    """Whether a kernel may begin before the one before it has ended, from Hopper on."""
    is_early = (
        device.type == "cuda"
        and gdc_wait is not None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return {"EARLY": True, "launch_pdl": True} if is_early else {"EARLY": False}

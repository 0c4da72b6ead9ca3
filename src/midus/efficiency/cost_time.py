"""From operations and bytes to seconds: a roofline with few, measured shares."""

from midus.efficiency.cost_work import Work
from midus.efficiency.gpus import Gpu, Shares


def phase_seconds(work: Work, gpu: Gpu, shares: Shares) -> dict[str, float]:
    """Seconds of each kind of work, as if they ran one after another; launches run beside them."""
    peak, bandwidth = gpu.bf16_tflops * 1e12, gpu.bandwidth_gbs * 1e9
    return {
        "products": work.matmul / (peak * shares.matmul)
        + work.float32 / (gpu.float32_tflops * 1e12 * shares.matmul),
        "attention": work.attention / (peak * shares.attention),
        "bytes": work.moved / (bandwidth * shares.bandwidth),
    }


def launch_seconds(work: Work, shares: Shares) -> float:
    """Seconds Python needs to start the kernels."""
    return work.launches * shares.launch_us * 1e-6


def total_seconds(work: Work, gpu: Gpu, shares: Shares) -> float:
    """The GPU's time, or Python's where that is longer."""
    return max(sum(phase_seconds(work, gpu, shares).values()), launch_seconds(work, shares))


def bound_by(work: Work, gpu: Gpu, shares: Shares) -> str:
    """What takes longest."""
    phases = phase_seconds(work, gpu, shares)
    if launch_seconds(work, shares) > sum(phases.values()):
        return "launches"
    return max(phases, key=lambda name: phases[name])

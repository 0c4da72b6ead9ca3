"""From operations and bytes to seconds: a roofline with few, measured shares."""

from midus.efficiency.cost_work import Work
from midus.efficiency.gpus import Gpu, Shares


def phase_seconds(work: Work, gpu: Gpu, shares: Shares) -> dict[str, float]:
    """Seconds of each kind of work, as if they ran one after another; the host runs beside."""
    peak, bandwidth = gpu.bf16_tflops * 1e12, gpu.bandwidth_gbs * 1e9
    scores = (
        work.linear_scores * shares.linear_passes + work.ultramem_scores * shares.ultramem_passes
    )
    return {
        "products": work.matmul / (peak * shares.products)
        + work.float32 / (gpu.float32_tflops * 1e12 * shares.products),
        "attention": work.attention / (peak * shares.products),
        "bytes": work.moved / (bandwidth * shares.bandwidth),
        "search": scores / (bandwidth * shares.bandwidth),
    }


def total_seconds(work: Work, gpu: Gpu, shares: Shares, launch_us: float) -> float:
    """The GPU's time, or the host's where that is longer.

    Args:
        work: What is done.
        gpu: The GPU.
        shares: How much of its data sheet it gives.
        launch_us: What the host takes to start one kernel.
    """
    return max(sum(phase_seconds(work, gpu, shares).values()), work.launches * launch_us * 1e-6)


def bound_by(work: Work, gpu: Gpu, shares: Shares, launch_us: float) -> str:
    """What takes longest."""
    phases = phase_seconds(work, gpu, shares)
    if work.launches * launch_us * 1e-6 > sum(phases.values()):
        return "host"
    return max(phases, key=lambda name: phases[name])

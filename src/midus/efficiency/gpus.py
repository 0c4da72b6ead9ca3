"""GPUs as their data sheets have them, and how much of that a model gets.

Data-sheet values and where they are from: `docs/plan.md`. The shares are measured on an H200 only;
other GPUs are taken to reach the same shares of their own data sheets, and hosts to be as quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from midus.errors import MidusError, suggest

NODE_SIZE = 8
"""GPUs that one NVLink domain connects."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, in units of 1e9."""

    name: str
    memory_gb: float
    """The data sheet's GB as 1e9 bytes; the few per cent a GPU has beyond that are left to the
    CUDA context and to fragmentation."""
    bandwidth_gbs: float
    """Memory, GB/s."""
    bf16_tflops: float
    """Dense matrix products in bfloat16 with float32 sums."""
    float32_tflops: float
    """Outside the tensor cores, where PyTorch's float32 products run."""
    link_gbs: float
    """To the GPUs of its node, one direction: NVLink, or PCIe where there is none."""
    network_gbs: float
    """To other nodes, one direction, a GPU's share: what its usual server has."""
    price: float
    """US dollars an hour: an example, to be replaced by one's own."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How much of the data sheet a model gets, and what data sheets do not say: measured."""

    products: float
    """Of the peak, in products with weights and in attention, causal halves counted as half."""
    bandwidth: float
    """Of the memory's bandwidth, in everything that is elementwise, and in the optimizer."""
    decode: float
    """Of the memory's bandwidth, in a compiled decoding step."""
    block_us: float
    """Microseconds of a compiled decoding step that a base block takes besides its bytes."""
    memory_us: Mapping[str, float]
    """The same of a memory block, by kind."""
    linear_passes: float
    """Times a linear memory's scores pass the GPU's memory in the search of its reference, ops of
    PyTorch: coarse, one number for all of them."""
    ultramem_passes: float
    """The same of UltraMem's, besides what is counted."""
    launch_us: float
    """Microseconds the host takes to start one kernel in inference; no matter of the GPU."""
    train_launch_us: float
    """The same in training without graphs, where autograd's work comes with it."""


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h200",
            memory_gb=141,
            bandwidth_gbs=4800,
            bf16_tflops=989,
            float32_tflops=67,
            link_gbs=450,
            network_gbs=50,
            price=3.5,
        ),
        Gpu(
            name="h100",
            memory_gb=80,
            bandwidth_gbs=3350,
            bf16_tflops=989,
            float32_tflops=67,
            link_gbs=450,
            network_gbs=50,
            price=2.5,
        ),
        Gpu(
            name="b200",
            memory_gb=180,
            bandwidth_gbs=8000,
            bf16_tflops=2250,
            float32_tflops=75,
            link_gbs=900,
            network_gbs=50,
            price=5.0,
        ),
        Gpu(
            name="a100-80g",
            memory_gb=80,
            bandwidth_gbs=2039,
            bf16_tflops=312,
            float32_tflops=19.5,
            link_gbs=300,
            network_gbs=25,
            price=1.6,
        ),
        Gpu(
            name="a100-40g",
            memory_gb=40,
            bandwidth_gbs=1555,
            bf16_tflops=312,
            float32_tflops=19.5,
            link_gbs=300,
            network_gbs=25,
            price=1.2,
        ),
        Gpu(
            name="l40s",
            memory_gb=48,
            bandwidth_gbs=864,
            bf16_tflops=362,
            float32_tflops=91.6,
            link_gbs=32,
            network_gbs=12.5,
            price=1.0,
        ),
        Gpu(
            name="rtx6000-blackwell",
            memory_gb=96,
            bandwidth_gbs=1792,
            bf16_tflops=500,
            float32_tflops=125,
            link_gbs=64,
            network_gbs=12.5,
            price=1.8,
        ),
        Gpu(
            name="rtx4090",
            memory_gb=24,
            bandwidth_gbs=1008,
            bf16_tflops=165,
            float32_tflops=82.6,
            link_gbs=32,
            network_gbs=12.5,
            price=0.5,
        ),
    )
}

MEASURED_ON = "h200"

# `benchmarks/plan_error.py --fit` prints these; which rows each comes from: `docs/plan.md`.
# `bandwidth` is a measured copy (4.3 of 4.8 TB/s). Products and attention have one share: in these
# rows they grow together, so that two could not be told apart.
SHARES = Shares(
    products=0.603,
    bandwidth=0.90,
    decode=1.021,
    block_us=22.8,
    memory_us={"hml": 14.4, "pkm": 135.6, "linear": 252.0, "ultramem": 260.1},
    linear_passes=25.4,
    ultramem_passes=56.6,
    launch_us=21.2,
    train_launch_us=43.2,
)


def find_gpu(name: str) -> Gpu:
    """The GPU of that name."""
    if name.lower() not in GPUS:
        raise MidusError(f"gpu={name!r} is unknown; {suggest(name.lower(), GPUS)}")
    return GPUS[name.lower()]

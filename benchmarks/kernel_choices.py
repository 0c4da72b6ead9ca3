"""The choices behind the kernels, measured on a CUDA device: which search, and why no atomics.

    python benchmarks/kernel_choices.py --json benchmarks/results/kernel_choices.json

One head-wise memory layer of the Llama-3.1-8B shape in bfloat16; CUDA-graph replays from a cold
L2 cache, median.
"""

import argparse
from pathlib import Path

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table

from midus.efficiency.hardware import hardware_name, pick_device
from midus.efficiency.layer import LayerShape, random_inputs
from midus.efficiency.timing import Timer
from midus.ops import headwise_memory, headwise_memory_cached
from midus.ops.weighted_gather.kernels import table_gradient
from midus.reports import write_result

SHAPE = LayerShape(32, 128, 128, 64, 4, 128)
NUM_SLOTS = SHAPE.num_subkeys**2


@triton.jit
def _atomic_kernel(
    grad_out, weights, slot_idx, grad_values,
    bag_size: tl.constexpr, width: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """``grad_values[slot] += weight * grad_out``, one float32 atomic a number."""
    bag = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    r = tl.arange(0, width)
    grad = tl.load(grad_out + bag[:, None] * width + r[None, :]).to(tl.float32)
    for k in tl.static_range(bag_size):
        slot = tl.load(slot_idx + bag * bag_size + k)
        weight = tl.load(weights + bag * bag_size + k)
        where = grad_values + slot[:, None] * width + r[None, :]
        tl.atomic_add(where, weight[:, None] * grad, sem="relaxed")


def measure_searches(timer: Timer) -> list[dict]:
    rows = []
    for tokens in (1, 2, 4, 8, 16, 64):
        inputs = random_inputs(SHAPE, tokens, torch.bfloat16, timer.device)
        cache = torch.matmul(inputs[3], inputs[4])
        row = {"what": "search", "tokens": tokens}
        with torch.no_grad():
            for search in ("cartesian", "two_stage"):
                row[f"cached_{search}_us"] = 1e3 * timer.graph(
                    lambda: headwise_memory_cached(*inputs[:3], cache, 4, search=search)  # noqa: B023
                )
                row[f"projected_{search}_us"] = 1e3 * timer.graph(
                    lambda: headwise_memory(*inputs, 4, search=search)  # noqa: B023
                )
        rows.append(row)
    return rows


def measure_table_gradients(timer: Timer) -> list[dict]:
    rows = []
    for tokens in (2048, 16384):
        bags = tokens * SHAPE.num_heads
        device = timer.device
        grad_out = torch.randn(bags, 128, device=device).bfloat16()
        weights = torch.rand(bags, 4, device=device)
        spread = torch.randint(0, NUM_SLOTS, (bags, 4), device=device, dtype=torch.int32)
        for slots, slot_idx in (("spread", spread), ("all on one", torch.full_like(spread, 7))):
            buffer = torch.zeros(NUM_SLOTS, 128, device=device)

            def atomics(buffer=buffer, args=(grad_out, weights, slot_idx), bags=bags):
                buffer.zero_()
                _atomic_kernel[(bags // 16,)](*args, buffer, 4, 128, 16)
                return buffer.bfloat16()

            def sorted_sums(args=(grad_out, slot_idx, weights)):
                return table_gradient(*args, NUM_SLOTS, torch.bfloat16)

            difference = (atomics().float() - sorted_sums().float()).norm() / buffer.norm()
            assert difference < 5e-3, difference
            rows.append(
                {
                    "what": "table gradient",
                    "tokens": tokens,
                    "slots": slots,
                    "sorted_us": 1e3 * timer.graph(sorted_sums),
                    "atomics_us": 1e3 * timer.graph(atomics),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = pick_device("cuda")
    timer = Timer(device)
    groups = (measure_searches(timer), measure_table_gradients(timer))
    for rows in groups:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()))
        Console(width=140).print(table)
    if options.json:
        write_result(options.json, [row for rows in groups for row in rows], hardware_name(device))


if __name__ == "__main__":
    main()

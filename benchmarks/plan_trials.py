"""What `midus plan` says of small models, beside the speeds that trials of a study had.

`midus bench efficiency` measured shapes of 1B and more; trials train a model of 135M. Used by
`benchmarks/plan_error.py`.
"""

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from midus.efficiency.cost_model import predict_training
from midus.efficiency.cost_sizes import read_stack
from midus.efficiency.cost_training import Run
from midus.efficiency.gpus import Gpu, Shares
from midus.efficiency.subjects import Subject
from midus.models.shapes import shape_config
from midus.studies.step_cost import step_cost
from midus.training.options import TrainOptions
from midus.upscaling.methods import plan_upscaling

STUDIES = Path(__file__).parents[1] / "docs" / "results"
COARSE = ("linear", "ultramem")
# Trials timed alone, since base and memory blocks train by the kernels they have today.
FILES = (
    "2026-11-16-math-methods.jsonl",
    "2026-11-16-recipe-variants.jsonl",
    "2026-11-16-ablations.jsonl",
    "2026-11-16-scaling.jsonl",
    "2026-11-18-long-muon.jsonl",
    "2026-11-18-equal-parameters.jsonl",
)


def read_trials() -> Iterator[dict[str, Any]]:
    """The lines of those studies."""
    for name in FILES:
        yield from map(json.loads, (STUDIES / name).read_text().splitlines())


def compare_trials(
    rows: Iterable[dict[str, Any]], gpu: Gpu, shares: Shares
) -> Iterator[dict[str, Any]]:
    """Seconds of a step, measured and predicted, once for all trials whose steps cost the same.

    LoRA is left out: there is no prediction for it. Muon's steps are predicted as AdamW's.

    Args:
        rows: Lines of results of `midus study`; the base is one of `midus.models.shapes`.
        gpu: What they ran on; lines of others are passed over.
        shares: How much of its data sheet it gives.
    """
    seen = set()
    for row in rows:
        speed = row.get("tokens_per_second")
        if not speed or row.get("patch") or gpu.name.upper() not in row["hardware"]:
            continue
        options = TrainOptions.from_dict(row["options"])
        if options.control != "none":
            continue
        base = shape_config(options.model)
        if (cost := step_cost(options, base)) in seen:
            continue
        seen.add(cost)
        run = run_of_trial(options, is_graphed=row["graphed"])
        config = (
            plan_upscaling(base, options.upscale, {})[1]
            if options.upscale
            else Subject(method="base").grown_config(base)
        )
        predicted = predict_training(read_stack(config), gpu, run, shares).seconds
        yield {
            "model": options.model,
            "hidden_size": base.hidden_size,
            "memory": options.upscale.memory.kind if options.upscale else None,
            "label": " ".join([row["method"], *_structure(row)]),
            "measured": run.tokens_per_iteration / speed,
            "predicted": predicted,
            "ratio": run.tokens_per_iteration / speed / predicted,
        }


def run_of_trial(options: TrainOptions, *, is_graphed: bool) -> Run:
    """How a trial trained, in the plan's words."""
    micro_batch = options.trainer["per_device_train_batch_size"]
    return Run(
        sequence=options.data.seq_len,
        micro_batch=micro_batch,
        accumulation=options.batch_size // micro_batch,
        precision=options.precision,  # type: ignore[arg-type]  # mixed and float32 are both's
        fused_blocks=options.fused_blocks,
        cuda_graphs=is_graphed,
    )


def summarize_trials(values: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times the predicted seconds a step took: least, median and most.

    Without linear memories and UltraMem, whose searches `midus plan` says are coarse anyway.
    """
    ratios = [value["ratio"] for value in values if value["memory"] not in COARSE]
    (model,) = {value["model"] for value in values}
    return {
        "model": model,
        "hidden_size": values[0]["hidden_size"],
        "values": len(ratios),
        "least": min(ratios),
        "median": statistics.median(ratios),
        "most": max(ratios),
    }


def _structure(row: dict[str, Any]) -> list[str]:
    """What was varied, but for rates, which cost nothing."""
    varied = row.get("varied") or {}
    found = [f"{name}={value}" for name, value in varied.items() if name.startswith("upscale")]
    return [*found, *(["by Muon"] if row["options"]["optimizer"].get("matrices") == "muon" else [])]

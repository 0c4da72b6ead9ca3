"""How far predictions were off where they could be compared with a measurement.

`benchmarks/plan_error.py --write` writes the file beside this one.
"""

import json
from pathlib import Path
from typing import Any

from midus.efficiency.gpus import MEASURED_ON, Gpu

ERROR_FILE = Path(__file__).parent / "plan_error.json"

# Of the shapes of `midus bench efficiency` that predictions were compared with.
SMALLEST_WIDTH = 2048

_LABELS = {
    "train_gb": "training memory",
    "train_s_per_iter": "s/iter",
    "infer_gb": "serving memory",
    "decode_compiled_tok_s": "decode",
    "prefill_ms": "prefill",
}


def summarize_errors(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each column the number of values, the mean and the largest |error| in per cent.

    Args:
        rows: One value each: ``shape``, ``label``, ``column``, ``prompt`` and ``error_percent``,
            and ``is_fitted`` where the value, or another of the same network, was used to set the
            shares. Such values are named under ``used`` and left out of the rest.
    """
    summary: dict[str, dict[str, Any]] = {}
    for column in _LABELS:
        found = [row for row in rows if row["column"] == column]
        errors = [abs(row["error_percent"]) for row in found if not row["is_fitted"]]
        if errors:
            summary[column] = {
                "values": len(errors),
                "mean": sum(errors) / len(errors),
                "worst": max(errors),
                "used": [_value_name(row) for row in found if row["is_fitted"]],
            }
    return summary


def _value_name(row: dict[str, Any]) -> str:
    prompt = f", {row['prompt']:,} tokens" if row["prompt"] else ""
    return f"{row['shape']} {row['label']}{prompt}"


def read_errors(path: Path = ERROR_FILE) -> dict[str, Any] | None:
    """What the comparison found, or None where there was none."""
    if not path.is_file():
        return None
    errors: dict[str, Any] = json.loads(path.read_text())
    return errors


def error_sentences(gpu: Gpu, errors: dict[str, Any] | None, hidden_size: int) -> list[str]:
    """What a user should know about how good the numbers are, for a model as wide as that."""
    if errors is None:
        said = ["these predictions have not been compared with measurements of whole models"]
    else:
        parts = ", ".join(
            f"{_LABELS[column]} {found['mean']:.1f} % (worst {found['worst']:.1f}, "
            f"{found['values']} values)"
            for column, found in errors["columns"].items()
        )
        said = [
            f"measured error of these predictions on the {MEASURED_ON.upper()}, one GPU, mean over "
            f"the values that no share was fitted to: {parts}"
        ]
        if "train_gb" in errors["columns"]:
            said.append(
                "the terms of training memory were set with these rows in sight, so its error is "
                "no independent check"
            )
        small = errors.get("small")
        if small and hidden_size < SMALLEST_WIDTH:
            said.append(
                f"a model as narrow as this (hidden_size={hidden_size}) trains more slowly than "
                f"predicted: steps of {small['model']} ({small['hidden_size']}) took "
                f"{small['least']:.1f} to {small['most']:.1f} times as long, {small['median']:.1f} "
                f"in the middle of {small['values']} values; docs/plan.md has them"
            )
    if gpu.name != MEASURED_ON:
        said.append(
            f"{gpu.name.upper()} is predicted from its data sheet with the shares of the "
            f"{MEASURED_ON.upper()}; nothing was measured on it"
        )
    return said

"""How far `midus plan` is off: every measured row of the efficiency results, predicted.

    python benchmarks/plan_error.py                 # the comparison, as a table and as JSON
    python benchmarks/plan_error.py --write         # and the summary that `midus plan` shows
    python benchmarks/plan_error.py --fit           # shares for src/midus/efficiency/gpus.py

Reads benchmarks/results/efficiency-SHAPE.json, as `midus bench efficiency` writes them. The shares
are fitted to base and Llama Pro of one shape only, so that every other row is a true prediction.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from midus.efficiency.cost_checked import ERROR_FILE, summarize_errors
from midus.efficiency.cost_comparison import (
    FITTED_METHODS,
    FITTED_SHAPE,
    compare_rows,
    predict_row,
    stack_of,
)
from midus.efficiency.cost_serving import prefill_work
from midus.efficiency.cost_sizes import Stack
from midus.efficiency.gpus import MEASURED_ON, SHARES, Shares, find_gpu
from midus.reports import conditions, write_json

RESULTS = Path(__file__).parent / "results"
# Shorter prompts are bound by Python's launches, which the fit of the arithmetic leaves out.
LONG_PROMPT = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--fit", action="store_true", help="print shares and stop")
    parser.add_argument("--write", action="store_true", help="write the summary midus plan shows")
    options = parser.parse_args()
    console = Console(highlight=False)
    results = read_results(options.results)
    if not results:
        sys.exit(f"no efficiency-SHAPE.json in {options.results}; run midus bench efficiency")
    if options.fit:
        console.print(fit(results[FITTED_SHAPE]))
        return
    gpu = find_gpu(MEASURED_ON)
    rows = []
    for shape, result in results.items():
        with console.status(shape):
            rows += compare_rows(result, shape, gpu, SHARES)
    print_rows(console, rows)
    checked = [row for row in rows if not row["is_fitted"]]
    summary = {
        "hardware": next(iter(results.values()))["hardware"],
        "commit": conditions()["commit"],
        "date": conditions()["date"],
        "fitted_to": f"{', '.join(FITTED_METHODS)} of {FITTED_SHAPE}",
        "rows": len({(row["shape"], row["label"]) for row in checked}),
        "columns": summarize_errors(rows),
    }
    write_json(options.results / "plan-error.json", {**summary, "values": rows})
    if options.write:
        write_json(ERROR_FILE, summary)
    for column, found in summary["columns"].items():
        console.print(
            f"{column}: mean |error| {found['mean']:.1f} %, worst {found['worst']:.1f} %, "
            f"over {found['values']} values that were not fitted"
        )


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The measured results by shape."""
    found = {}
    for path in sorted(folder.glob("efficiency-*.json")):
        result = json.loads(path.read_text())
        shape = path.stem.removeprefix("efficiency-")
        if "H200" in result["hardware"]:
            found[shape] = result
        else:
            print(f"{path.name} was measured on {result['hardware']}: left out", file=sys.stderr)
    return found


def print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("shape", "row", "column", "measured", "predicted", "error", ""):
        table.add_column(name, justify="left" if name in ("shape", "row", "column") else "right")
    for row in rows:
        prompt = f" {row['prompt']:,}" if row["prompt"] else ""
        table.add_row(
            row["shape"],
            row["label"],
            row["column"] + prompt,
            f"{row['measured']:,.4g}",
            f"{row['predicted']:,.4g}",
            f"{row['error_percent']:+.1f} %",
            "fitted" if row["is_fitted"] else "",
        )
    console.print(table)


def fit(result: dict[str, Any]) -> Shares:
    """The shares with which base and Llama Pro come closest to what was measured."""
    rows = [row for row in result["rows"] if row["method"] in FITTED_METHODS]
    stacks = [stack_of(row, FITTED_SHAPE) for row in rows]
    pairs = list(zip(rows, stacks, strict=True))
    protocol = result["protocol"]
    grid = [
        replace(SHARES, matmul=matmul / 100, attention=attention / 25)
        for matmul in range(30, 96)
        for attention in range(5, 25)
    ]
    best = min(grid, key=lambda shares: _distance(pairs, protocol, shares))
    ratios = [
        row["decode_compiled_tok_s"] / _predict(stack, row, protocol, best)["decode_compiled_tok_s"]
        for row, stack in pairs
        if row.get("decode_compiled_tok_s")
    ]
    decode = best.decode * math.prod(ratios) ** (1 / len(ratios)) if ratios else best.decode
    return replace(best, decode=round(decode, 3), launch_us=_launch_us(pairs))


def _distance(pairs: list[Any], protocol: dict[str, Any], shares: Shares) -> float:
    """The sum of squared logarithms of predicted over measured."""
    total = 0.0
    for row, stack in pairs:
        predicted = _predict(stack, row, protocol, shares)
        if row["train_s_per_iter"]:
            total += math.log(predicted["train_s_per_iter"] / row["train_s_per_iter"]) ** 2
        for length, ms in row["prefill_ms"].items():
            if ms and int(length) >= LONG_PROMPT:
                total += math.log(predicted["prefill_ms"][length] / ms) ** 2
    return total


def _predict(
    stack: Stack, row: dict[str, Any], protocol: dict[str, Any], shares: Shares
) -> dict[str, Any]:
    prompts = [int(length) for length in row["prefill_ms"] if int(length) >= LONG_PROMPT]
    return predict_row(stack, protocol, prompts, find_gpu(MEASURED_ON), shares)


def _launch_us(pairs: list[Any]) -> float:
    """From eager decoding, which launches and little else: what the added blocks add."""
    steps = {
        row["method"]: (1 / row["decode_eager_tok_s"], prefill_work(stack, 1).launches)
        for row, stack in pairs
        if row.get("decode_eager_tok_s")
    }
    if len(steps) < len(FITTED_METHODS):
        return SHARES.launch_us
    (short, few), (long, many) = (steps[method] for method in FITTED_METHODS)
    return round((long - short) / (many - few) * 1e6, 1)


if __name__ == "__main__":
    main()

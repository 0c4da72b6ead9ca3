"""How far `midus plan` is off: every measured row of the efficiency results, predicted.

    python benchmarks/plan_error.py                 # the comparison, as a table and as JSON
    python benchmarks/plan_error.py --write         # and the summary that `midus plan` shows
    python benchmarks/plan_error.py --fit           # shares for src/midus/efficiency/gpus.py

Reads benchmarks/results/efficiency-SHAPE.json, as `midus bench efficiency` writes them. Which
values the shares are fitted to stands in `midus.efficiency.cost_comparison.USED`; all others are
true predictions, and only those count in the summary. Speeds of a small model, from studies, stand
apart (`plan_trials.py`).
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from plan_trials import compare_trials, read_trials, summarize_trials
from rich.console import Console
from rich.table import Table

from midus.efficiency.cost_checked import ERROR_FILE, summarize_errors
from midus.efficiency.cost_comparison import (
    LARGE,
    LONG_PROMPT,
    SMALL,
    compare_rows,
    name_of,
    predict_row,
    run_of,
    stack_of,
)
from midus.efficiency.cost_serving import prefill_work
from midus.efficiency.cost_sizes import Stack
from midus.efficiency.gpus import MEASURED_ON, SHARES, Shares, find_gpu
from midus.errors import MidusError
from midus.models.shapes import SHAPES
from midus.reports import conditions, write_json

RESULTS = Path(__file__).parent / "results"
# Models that are blocks of the base and nothing else.
PLAIN_METHODS = ("base", "llama_pro", "opt_deus")

Measured = dict[str, tuple[dict[str, Any], Stack]]
"""Rows and their models by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--fit", action="store_true", help="print shares and stop")
    parser.add_argument("--write", action="store_true", help="write the summary midus plan shows")
    options = parser.parse_args()
    console = Console(highlight=False)
    results = read_results(options.results)
    if not results:
        sys.exit(f"no efficiency-SHAPE.json of {MEASURED_ON.upper()} in {options.results}")
    try:
        if options.fit:
            console.print(fit(results, options.results))
            return
        compare(results, options.results, options.write, console)
    except MidusError as error:
        sys.exit(str(error))


def compare(
    results: dict[str, dict[str, Any]], folder: Path, is_kept: bool, console: Console
) -> None:
    """Prints and writes every value with its prediction, and the summary."""
    rows = []
    for shape, result in results.items():
        with console.status(shape):
            rows += compare_rows(result, shape, find_gpu(MEASURED_ON), SHARES)
    print_rows(console, rows)
    trials = list(compare_trials(read_trials(), find_gpu(MEASURED_ON), SHARES))
    for trial in trials:
        console.print(
            f"{trial['model']} {trial['label']}: {trial['measured'] * 1e3:.1f} ms a step, "
            f"{trial['predicted'] * 1e3:.1f} predicted, {trial['ratio']:.2f} times that"
        )
    summary = {
        "hardware": next(iter(results.values()))["hardware"],
        "commit": conditions()["commit"],
        "date": conditions()["date"],
        "results": {shape: result.get("commit") for shape, result in results.items()},
        "columns": summarize_errors(rows),
        "small": summarize_trials(trials),
    }
    write_json(folder / "plan-error.json", {**summary, "values": rows, "trials": trials})
    if is_kept:
        write_json(ERROR_FILE, summary)
    for column, found in summary["columns"].items():
        console.print(
            f"{column}: mean |error| {found['mean']:.1f} %, worst {found['worst']:.1f} %, over "
            f"{found['values']} values that no share was fitted to"
            + (
                f"; fitted to, or the same network: {'; '.join(found['used'])}"
                if found["used"]
                else ""
            )
        )


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The measured results by shape; says in a sentence which files it leaves out."""
    found = {}
    for path in sorted(folder.glob("efficiency-*.json")):
        try:
            result = json.loads(path.read_text())
            shape = result["protocol"]["base"]
            run_of(result["protocol"])
            if "H200" not in result["hardware"]:
                reason = f"was measured on {result['hardware']}"
            elif shape not in SHAPES:
                reason = f"was measured with {shape}, which is no built-in shape"
            elif shape in found:
                reason = f"is a second result of {shape}"
            else:
                found[shape] = result
                continue
        except MidusError as error:
            reason = str(error)
        except (ValueError, KeyError, TypeError):
            reason = "is no result of midus bench efficiency"
        print(f"{path.name}: {reason}; left out", file=sys.stderr)
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


def fit(results: dict[str, dict[str, Any]], folder: Path) -> Shares:
    """The shares with which the values of ``USED`` come closest to what was measured.

    One after another, each from values that do not depend on those that follow.
    """
    for shape in (LARGE, SMALL):
        if shape not in results:
            raise MidusError(
                f"efficiency-{shape}.json is missing, and the shares are fitted to {LARGE} and "
                f"{SMALL}; run midus bench efficiency --shape {shape}"
            )
    protocol = results[LARGE]["protocol"]
    large, small = (_measured(results, shape) for shape in (LARGE, SMALL))
    shares = SHARES

    def try_out(pairs: list[Any], columns: tuple[str, ...], make: Callable[[int], Shares]) -> None:
        nonlocal shares

        def best(numbers: range) -> int:
            return min(numbers, key=lambda n: _distance(pairs, columns, protocol, make(n)))

        coarse = best(range(20, 1000, 20))
        shares = make(best(range(coarse - 19, coarse + 20)))

    plain = [large["base"], large["llama_pro"]]
    try_out(
        plain,
        ("train_s_per_iter", "prefill_ms"),
        lambda n: replace(shares, products=n / 1000, launch_us=0.0, train_launch_us=0.0),
    )
    for kind in ("linear", "ultramem"):
        name = f"{kind}_passes"
        try_out(
            [large[f"midus:{kind}"]],
            ("prefill_ms",),
            lambda n, name=name: replace(shares, **{name: n / 5}),  # type: ignore[misc]
        )
    shares = replace(shares, **_decode_shares(large, small, protocol))
    launches = [
        1e6 / measured[name][0]["decode_eager_tok_s"] / prefill_work(measured[name][1], 1).launches
        for measured in (large, small)
        for name in PLAIN_METHODS
    ]
    shares = replace(shares, launch_us=round(statistics.median(launches), 1))
    eager = _eager_steps(folder)
    protocol = eager["protocol"]
    try_out(
        [
            (row, stack_of(row, SMALL))
            for row in eager["rows"]
            if name_of(row) in ("base", "llama_pro")
        ],
        ("train_s_per_iter",),
        lambda n: replace(shares, train_launch_us=n / 10),
    )
    return shares


def _eager_steps(folder: Path) -> dict[str, Any]:
    """Training without graphs, where the host is what bounds a small model."""
    path = folder / f"eager-steps-{SMALL}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise MidusError(
            f"{path.name} is missing; run midus bench efficiency --eager-steps --shape {SMALL}"
        ) from error
    return found


def _measured(results: dict[str, dict[str, Any]], shape: str) -> Measured:
    rows = results[shape]["rows"]
    names = {*PLAIN_METHODS, *(f"midus:{kind}" for kind in SHARES.memory_us)}
    found = {name_of(row): (row, stack_of(row, shape)) for row in rows if name_of(row) in names}
    if missing := sorted(names - found.keys()):
        raise MidusError(f"efficiency-{shape}.json has no row of {', '.join(missing)}")
    return found


def _decode_shares(large: Measured, small: Measured, protocol: dict[str, Any]) -> dict[str, Any]:
    """Bandwidth and a base block's latency from four rows, each memory's latency from one.

    One shape alone does not tell the two apart: its bytes grow as its blocks do.
    """

    def seconds(pair: tuple[dict[str, Any], Stack], shares: Shares) -> float:
        return 1 / float(_predict(*pair, protocol, shares)["decode_compiled_tok_s"])

    def measured(pair: tuple[dict[str, Any], Stack]) -> float:
        return 1 / float(pair[0]["decode_compiled_tok_s"])

    zero = dict.fromkeys(SHARES.memory_us, 0.0)
    silent = replace(SHARES, decode=1.0, block_us=0.0, memory_us=zero)
    # Relative least squares of  measured = bytes / decode + blocks * latency.
    sums = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    for pair in (measured_in[name] for measured_in in (large, small) for name in PLAIN_METHODS[:2]):
        terms = (seconds(pair, silent) / measured(pair), pair[1].depth * 1e-6 / measured(pair))
        for i in (0, 1):
            for j, other in enumerate((*terms, 1.0)):
                sums[i][j] += terms[i] * other
    (a, b, x), (_, c, y) = sums
    inverse, block_us = (c * x - b * y) / (a * c - b * b), (a * y - b * x) / (a * c - b * b)
    found = {"decode": round(1 / inverse, 3), "block_us": round(block_us, 1)}
    memory_us = {}
    for kind in zero:
        pair = large[f"midus:{kind}"]
        if pair[0]["decode_compiled_tok_s"] is None:
            pair = small[f"midus:{kind}"]
        rest = measured(pair) - seconds(pair, replace(silent, **found))
        memory_us[kind] = round(rest / len(pair[1].positions) * 1e6, 1)
    return {**found, "memory_us": memory_us}


def _distance(
    pairs: list[Any], columns: tuple[str, ...], protocol: dict[str, Any], shares: Shares
) -> float:
    """The sum of squared logarithms of predicted over measured."""
    total = 0.0
    for row, stack in pairs:
        predicted = _predict(row, stack, protocol, shares)
        if "train_s_per_iter" in columns:
            total += math.log(predicted["train_s_per_iter"] / row["train_s_per_iter"]) ** 2
        if "prefill_ms" in columns:
            for length, ms in predicted["prefill_ms"].items():
                total += math.log(ms / row["prefill_ms"][length]) ** 2
    return total


def _predict(
    row: dict[str, Any], stack: Stack, protocol: dict[str, Any], shares: Shares
) -> dict[str, Any]:
    prompts = [
        int(length) for length, ms in row["prefill_ms"].items() if ms and int(length) >= LONG_PROMPT
    ]
    return predict_row(stack, protocol, prompts, find_gpu(MEASURED_ON), shares)


if __name__ == "__main__":
    main()

"""Every method on a real model: time, peak memory, parameters and how much the output changes.

    python benchmarks/methods.py --json runs/methods.jsonl

`midus upscale` and `midus verify` run in processes of their own, on the embedded SmolLM2-135M
(30 -> 45 blocks) unless another base is given.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from measured import run_captured
from rich.console import Console
from rich.table import Table

from midus.memory import MEMORY_LAYERS
from midus.reports import write_report
from midus.upscaling import METHODS


def rows_to_run() -> dict[str, list[str]]:
    rows = {f"midus:{kind}": ["--method", "midus", "--memory", kind] for kind in MEMORY_LAYERS}
    rows |= {name: ["--method", name] for name in METHODS if name != "midus"}
    rows["opt_deus, rescaled"] = ["--method", "opt_deus", "--ot-rescale"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only", nargs="*", help="names of rows to run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    midus = shutil.which("midus", path=str(Path(sys.executable).parent)) or sys.exit("no midus")
    rows = []
    chosen = {k: v for k, v in rows_to_run().items() if not options.only or k in options.only}
    with tempfile.TemporaryDirectory(prefix="midus-bench-") as scratch:
        out = Path(scratch) / "out"
        for name, arguments in chosen.items():
            with console.status(f"{name} ({len(rows) + 1} of {len(chosen)})"):
                seconds, peak, text = run_captured(
                    [midus, "upscale", options.base, str(out), "--overwrite", "--json", *arguments]
                )
                made = json.loads(text)
                limit = ["--max-tokens", str(options.tokens)]
                _, _, text = run_captured(
                    [midus, "verify", options.base, str(out), "--json", *limit]
                )
                compared = json.loads(text)
            rows.append(
                {
                    "row": name,
                    "base": options.base,
                    "seconds": round(seconds, 1),
                    "peak_rss_bytes": int(peak),
                    "trainable": made["params"]["trainable"],
                    "total": made["params"]["total"],
                    "max_abs_logit_diff": compared["max_abs_logit_diff"],
                    "base_perplexity": compared["base_perplexity"],
                    "perplexity": compared["upscaled_perplexity"],
                }
            )
            if options.json:  # after every row: a long run that is cut off keeps what it has
                write_report(options.json, rows)
    table = Table(
        "method", "s", "peak RSS (GB)", "trainable", "total", "largest |Δ logit|", "perplexity"
    )
    for row in rows:
        table.add_row(
            row["row"],
            f"{row['seconds']:.0f}",
            f"{row['peak_rss_bytes'] / 1e9:.2f}",
            f"{row['trainable']:,}",
            f"{row['total']:,}",
            f"{row['max_abs_logit_diff']:.4g}",
            f"{row['perplexity']:.4g}",
        )
    console.print(table)


if __name__ == "__main__":
    main()

"""Peak memory of `midus upscale` on a random bfloat16 checkpoint of the Llama-3.2-1B shape.

    python benchmarks/upscale_memory.py --json runs/upscale_memory.json

Each command runs in a process of its own, whose largest resident set the system reports. Limits: a
delta stays under 1.5 GB, a full checkpoint under its largest shard and 1 GB.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from measured import run_measured
from rich.console import Console
from rich.table import Table

from midus.reports import write_report

GB = 1e9


def make_base(folder: Path, shape: str, shards: int) -> None:
    """Random weights written shard by shard, so that making them takes little memory."""
    import json

    import torch
    from safetensors.torch import save_file

    from midus.models.families import find_family
    from midus.models.shapes import shape_config

    config = shape_config(shape)
    with torch.device("meta"):
        model = find_family(config.model_type).causal_lm_class(config)
    names = {name: p.shape for name, p in model.named_parameters()}
    config.dtype = "bfloat16"
    config.architectures = [type(model).__name__]
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    weight_map = {}
    ordered = list(names)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        tensors = {
            name: torch.randn(names[name], dtype=torch.bfloat16) * 0.02
            for name in ordered[number::shards]
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    midus = shutil.which("midus", path=str(Path(sys.executable).parent)) or sys.exit("no midus")
    rows = []
    with tempfile.TemporaryDirectory(prefix="midus-bench-") as scratch:
        for shards in (1, 4):
            base = Path(scratch) / f"base-{shards}"
            with console.status(f"writing a random {options.shape} in {shards} shard(s)"):
                # In a child, so that this process stays small.
                child = os.fork()
                if child == 0:
                    make_base(base, options.shape, shards)
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
            largest = max(path.stat().st_size for path in base.glob("*.safetensors"))
            for kind in ("--delta", "--full"):
                out = Path(scratch) / "out"
                with console.status(f"midus upscale {kind}, base in {shards} shard(s)"):
                    seconds, peak = run_measured([midus, "upscale", str(base), str(out), kind])
                limit = 1.5 * GB if kind == "--delta" else largest + GB
                rows.append(
                    {
                        "shape": options.shape,
                        "base_shards": shards,
                        "base_bytes": sum(p.stat().st_size for p in base.glob("*.safetensors")),
                        "largest_shard_bytes": largest,
                        "checkpoint": kind.removeprefix("--"),
                        "peak_rss_bytes": int(peak),
                        "limit_bytes": int(limit),
                        "seconds": round(seconds, 1),
                        "written_bytes": sum(p.stat().st_size for p in out.iterdir()),
                    }
                )
                shutil.rmtree(out)
            shutil.rmtree(base)
    table = Table("base shards", "checkpoint", "peak RSS (GB)", "limit (GB)", "written (GB)", "s")
    for row in rows:
        table.add_row(
            str(row["base_shards"]),
            row["checkpoint"],
            f"{row['peak_rss_bytes'] / GB:.2f}",
            f"{row['limit_bytes'] / GB:.2f}",
            f"{row['written_bytes'] / GB:.2f}",
            f"{row['seconds']:.0f}",
        )
    console.print(table)
    if options.json:
        write_report(options.json, rows)
    if any(row["peak_rss_bytes"] > row["limit_bytes"] for row in rows):
        sys.exit("a limit was passed")


if __name__ == "__main__":
    main()

"""How large the residual stream is before each block of a base, and the weights that write into it.

    python benchmarks/stream_sizes.py study_data/math --json runs/stream_sizes.json

What an inserted block changes in its first steps is as large as its rates, wherever it stands; how
much that is to the blocks after it depends on the stream it is added to.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from midus.data.tokens import TokenDataset, TokenFolder
from midus.models.loading import load_model
from midus.reports import machine_name, write_result
from midus.training.stream_size import stream_sizes
from midus.training.weight_size import weight_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", type=Path, help="A folder of midus data build.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-tokens", type=int, default=8_192)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(options.model, dtype=torch.float32, device="cpu").eval()
    dataset = TokenDataset(TokenFolder(options.tokens), "train", options.length)
    number = min(len(dataset), max(1, options.num_tokens // options.length))
    tokens = torch.stack([dataset[row]["input_ids"] for row in range(number)])
    sizes = stream_sizes(model, model.model.layers, track(tokens.split(1), "reading"))
    table = Table("block", "stream")
    for index, size in enumerate(sizes):
        table.add_row(str(index), f"{size:.3f}")
    weights = weight_size(model)
    Console().print(table, f"weights {weights:.4f}")
    if options.json:
        rows = [{"block": index, "stream": size} for index, size in enumerate(sizes)]
        write_result(options.json, [*rows, {"weights": weights}], machine_name())


if __name__ == "__main__":
    main()

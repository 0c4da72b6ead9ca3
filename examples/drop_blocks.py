"""Make a shallower base of a deeper one: some of its blocks, evenly spread, and everything else.

    python examples/drop_blocks.py smollm2-135m 10 runs/ten_blocks

What is left no longer speaks; studies/rate_rule.yaml trains it before it is a base.
"""

import sys
from pathlib import Path
from typing import Any

from torch import nn

from midus.models.loading import load_model, load_tokenizer


def drop_blocks(source: str, num_blocks: int, out: Path) -> None:
    """Writes a model of ``num_blocks`` of the source's blocks and its tokenizer into ``out``."""
    model: Any = load_model(source)
    blocks = model.model.layers
    kept = spread(len(blocks), num_blocks)
    model.model.layers = nn.ModuleList(blocks[i] for i in kept)
    model.config.num_hidden_layers = num_blocks
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
    model.save_pretrained(out)
    load_tokenizer(source).save_pretrained(out)
    print(f"{out}: blocks {kept} of {len(blocks)}, {model.num_parameters():,} parameters")


def spread(total: int, number: int) -> list[int]:
    """``number`` of ``total`` indices, the first and the last among them."""
    if not 2 <= number <= total:
        raise SystemExit(f"{number} blocks of {total}: give a number from 2 to {total}")
    return [round(i * (total - 1) / (number - 1)) for i in range(number)]


if __name__ == "__main__":
    if len(sys.argv) != 4 or not sys.argv[2].isdigit():
        raise SystemExit("usage: python examples/drop_blocks.py MODEL BLOCKS OUT")
    drop_blocks(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

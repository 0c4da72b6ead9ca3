"""`midus bench`: what things cost, measured here; a table, and JSON on request."""

from pathlib import Path
from typing import Annotated, Any

import typer

from midus.cli.bench_models import decode, efficiency, prefill, sweep
from midus.errors import MidusError

bench = typer.Typer(
    help="Measure times on this machine: tables, and JSON with hardware, versions and commit.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


for _command in (efficiency, prefill, sweep, decode):
    bench.command()(_command)


@bench.command()
def layer(
    shape: Annotated[str, typer.Option(help="Built-in model shape.")] = "llama-3.1-8b",
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens, with commas; default: by device.")
    ] = "",
    num_subkeys: Annotated[int, typer.Option(help="Row and column sub-keys (paper: n).")] = 64,
    top_k: Annotated[int, typer.Option(help="Slots read per head and token.")] = 4,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there is one.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows there.")] = None,
) -> None:
    """Time one head-wise memory layer against plain, compiled and the paper's PyTorch.

    On a CPU ours is the plain reference, which is no faster than the others.
    """
    import torch

    from midus.cli import console
    from midus.efficiency.hardware import hardware_name, pick_device
    from midus.efficiency.layer import measure_layer
    from midus.efficiency.protocol import parse_numbers
    from midus.reports import write_result

    chosen = pick_device(device)
    types = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in types:
        raise MidusError(f"dtype={dtype!r} is unknown; choose one of {', '.join(types)}")
    default = "1,16,128,2048,16384" if chosen.type == "cuda" else "1,16,128"
    counts = parse_numbers("tokens", tokens or default)
    rows: list[dict[str, Any]] = []
    with console.err.status("checking, then timing"):
        for row in measure_layer(
            _layer_shape(shape, num_subkeys, top_k), counts, types[dtype], chosen
        ):
            rows.append(row)
            console.err.print(f"{row['tokens']} tokens done")
    columns = ["tokens", "naive", "compiled", "paper", "ours", "ratio"]
    if chosen.type == "cuda":
        columns += ["graph: naive", "ours", "ratio"]
    for title, kind in (("forward", "fwd"), ("forward and backward", "fwdbwd")):
        console.print_table(f"{title}, median ms", columns, [_line(row, kind) for row in rows])
    for row in rows:
        console.out.print(
            f"{row['tokens']:>7,} tokens: error {row['rel_error']:.1e} of float32, "
            f"backward {'' if row['backward_repeatable'] else 'NOT '}the same to the bit, "
            f"forward cannot take less than {row['floor_fwd_ms']:.4f} ms (bytes)"
        )
    if json_path:
        write_result(json_path, rows, hardware_name(chosen))


def _line(row: dict[str, Any], kind: str) -> list[str]:
    cells = [f"{row['tokens']:,}"]
    for clock, names in (
        ("", ("naive", "compiled", "paper", "ours")),
        ("_graph", ("naive", "ours")),
    ):
        if f"naive_{kind}{clock}_ms" in row:
            times = [row[f"{name}_{kind}{clock}_ms"] for name in names]
            cells += [*(f"{time:.3f}" for time in times), f"{times[0] / times[-1]:.1f}"]
    return cells


def _layer_shape(name: str, num_subkeys: int, top_k: int) -> Any:
    from midus.config import MemoryConfig
    from midus.efficiency.layer import LayerShape
    from midus.models.attention import head_dim
    from midus.models.shapes import SHAPES, shape_config

    if name not in SHAPES:
        raise MidusError(f"shape {name!r} is unknown; choose one of {', '.join(SHAPES)}")
    MemoryConfig(num_subkeys=num_subkeys, top_k=top_k)  # says what is wrong with them
    config = shape_config(name)
    width = config.hidden_size // config.num_attention_heads
    return LayerShape(
        config.num_attention_heads, head_dim(config), width, num_subkeys, top_k, width
    )

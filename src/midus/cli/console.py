"""What the commands print: progress on stderr, results on stdout."""

import json
import sys
import warnings
from collections.abc import Iterable
from logging import ERROR, getLogger
from math import isfinite
from typing import Any

from rich.console import Console
from rich.progress import track as rich_track
from rich.table import Table

_COLOURS = {"base": "", "memory": "bold magenta", "copy": "bold cyan"}

out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False)


def track(items: Iterable[Any], description: str) -> Iterable[Any]:
    """A progress bar on stderr, on terminals only."""
    items = list(items)
    return rich_track(
        items,
        description=description,
        console=err,
        total=len(items),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def quieten_libraries() -> None:
    """Keeps the libraries' own bars and warnings out of the commands' output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("bitsandbytes").setLevel(ERROR)
    # Warnings of ours are notes for the user: once each, without file and line.
    warnings.filterwarnings("once", category=UserWarning, module=r"midus\.")
    warnings.formatwarning = lambda message, *_, **__: f"midus: {message}\n"


def print_json(values: dict[str, Any]) -> None:
    """One JSON object; a number that JSON cannot hold (infinity, NaN) becomes null."""
    finite = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}
    print(json.dumps(finite, indent=2, allow_nan=False))


def print_stack(blocks: Iterable[Any]) -> None:
    """The new stack, one line a block."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("index", justify="right")
    table.add_column("block")
    table.add_column("of the base", justify="right")
    for index, block in enumerate(blocks):
        where = str(block.source) if block.kind == "base" else f"from {block.source}"
        table.add_row(str(index), block.kind, where, style=_COLOURS[block.kind])
    out.print(table)


def print_facts(facts: dict[str, Any]) -> None:
    """What `inspect` and `upscale` say of a model."""
    params = facts["params"]
    share = 100 * params["trainable"] / params["total"]
    memory = f" with {facts['memory']}" if facts["memory"] else ""
    out.print(
        f"{facts['family']}, {facts['method']}{memory}: "
        f"{facts['num_base_layers']} base + {facts['num_inserted']} inserted = "
        f"{facts['num_hidden_layers']} blocks"
    )
    out.print(f"anchors    {facts['anchors']}")
    out.print(f"positions  {facts['positions']}")
    out.print(f"base       {params['base']:>17,} parameters")
    out.print(f"trainable  {params['trainable']:>17,} ({share:.2f} % of the total)")
    out.print(f"total      {params['total']:>17,}")
    out.print(f"slots      {facts['slots']:>17,}")


def print_notes(notes: list[str]) -> None:
    for note in notes:
        out.print(f"note       {note}", style="yellow")


def print_proof(done: Any, base: str, change: float | None) -> None:
    """What an up-scaling was shown to preserve, or by how much it changes the output."""
    if done.identity_blocks is None:
        measured = (
            f"by how much: midus verify {base} {done.folder}"
            if change is None
            else f"largest |Δ logit| {change:.4g} on 64 tokens"
        )
        out.print(
            f"changed    this method does not preserve the function; {measured}", style="yellow"
        )
        return
    tensors = (
        f"{done.equal_base_tensors} base tensors are byte-equal"
        if done.equal_base_tensors is not None
        else "the base's tensors are used as they are"
    )
    out.print(
        f"preserved  {done.identity_blocks} of {done.identity_blocks} inserted blocks return their "
        f"input bit for bit; {tensors}",
        style="green",
    )


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Numbers under headings."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Named rows, two lines each: what it does, then everything else about it."""
    out.print(title, style="bold underline")
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("name", "does")}
        out.print(f"{row['name']:<14} {row['does']}", style="bold")
        out.print(" " * 15 + "; ".join(f"{key}: {value}" for key, value in rest.items()))
    out.print()

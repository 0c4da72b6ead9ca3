"""What the commands print: progress on stderr, results on stdout."""

import io
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from logging import ERROR, getLogger
from typing import Any, TextIO, cast

from rich.console import Console
from rich.measure import Measurement
from rich.progress import track as rich_track
from rich.table import Table
from rich.text import Text

from midus.reports import finite

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


@contextmanager
def without_foreign_bars() -> Iterator[None]:
    """Keeps bars that libraries draw on stderr out of files; on terminals they stay."""
    if sys.stderr.isatty():
        yield
        return
    with redirect_stderr(cast("TextIO", _NoBars(sys.stderr))):
        yield


class _NoBars(io.TextIOBase):
    """Drops what overwrites its own line, which is what bars do, and the end of such a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._dropped = False

    def write(self, text: str) -> int:
        is_bar = "\r" in text or (self._dropped and text == "\n")
        self._dropped = is_bar
        return len(text) if is_bar else self._file.write(text)

    def flush(self) -> None:
        self._file.flush()


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
    print(json.dumps(finite(values), indent=2, allow_nan=False))


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
        f"{done.equal_base_tensors} base tensors are "
        + (f"equal once converted to {done.config.dtype}" if done.is_converted else "byte-equal")
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


def short_names(models: list[str]) -> list[str]:
    """Names that fit over a column: the ends of paths, as long as it takes to tell them apart."""
    parts = [[part for part in model.split("/") if part] or [model] for model in models]
    for length in range(1, 5):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(models)) and not set(names) & {"model"}:
            return names
    return models


def print_scores(
    suite: Any,
    lines: list[Any],
    models: list[Any],
    paper: list[Any],
    missing: dict[str, str],
    limit: int | None,
) -> None:
    """Tasks down, models across, best in bold, the paper in columns of its own."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("task", no_wrap=True)
    table.add_column("shots", justify="right", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    names = short_names([model.model for model in models])
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in paper:
        table.add_column(f"paper: {row.method}", justify="right", style="dim", no_wrap=True)
    for line in lines:
        printed = ["" if value is None else f"{value:.2f}" for value in line.paper]
        cells = [
            Text(cell.text(line.percent), style="bold" if cell.is_best else "")
            for cell in line.cells
        ]
        shots = "" if line.shots is None else str(line.shots)
        arrow = "" if line.higher_is_better else " ↓"
        table.add_row(line.label, shots, line.metric + arrow, *cells, *printed)
    out.print(f"{suite.name}: {suite.about}", style="bold")
    # A table that is wider than the terminal is better than numbers cut in two.
    table.width = Measurement.get(out, out.options.update(width=1000), table).maximum
    out.print(table)
    for name, model in zip(names, models, strict=True):
        if name != model.model:
            out.print(f"{name} is {model.model}", style="dim")
    for where in dict.fromkeys((row.backbone, row.stage) for row in paper):
        out.print(f"the paper's numbers are those of {where[0]} after {where[1]}", style="dim")
    if limit:
        out.print(f"at most the first {limit} documents of each task", style="yellow")
    if missing:
        out.print(
            f"partial: {len(missing)} of {len(suite.columns)} columns are missing", style="yellow"
        )
    for name, reason in missing.items():
        out.print(f"  {name}: {reason}", style="yellow")


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Named rows, two lines each: what it does, then everything else about it."""
    out.print(title, style="bold underline")
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("name", "does")}
        out.print(f"{row['name']:<14} {row['does']}", style="bold")
        out.print(" " * 15 + "; ".join(f"{key}: {value}" for key, value in rest.items()))
    out.print()

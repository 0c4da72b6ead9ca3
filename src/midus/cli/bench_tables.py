"""What `midus bench` prints of whole models: figures, with their ratio to a reference beside."""

from typing import Any

from rich.measure import Measurement
from rich.table import Table

from midus.cli import console
from midus.efficiency.paper import paper_row
from midus.efficiency.ratios import (
    difference_of,
    find_row,
    noise_of,
    ratio_of,
    value_of,
    with_ratio,
)

Row = dict[str, Any]


def print_efficiency(rows: list[Row], paper_target: str | None) -> None:
    """Training and inference, one line a method; ``paper_target`` adds the paper's columns."""
    base, dus = find_row(rows, "base"), find_row(rows, "llama_pro")
    papers = {id(row): paper_row(paper_target, row) for row in rows if paper_target}

    def cell(row: Row, column: str, digits: int, key: str | None = None, by: Any = base) -> str:
        noise = noise_of(row, column, key)
        if noise is not None:
            return f"{value_of(row, column, key):,.{digits}f} ± {noise:,.{digits}f}"
        return with_ratio(value_of(row, column, key), ratio_of(row, by, column, key), digits)

    def printed(row: Row, *columns: str) -> list[str]:
        known = papers.get(id(row))
        if not paper_target:
            return []
        values = [getattr(known, column) if known else None for column in columns]
        return ["" if value is None else f"{value:g}" for value in values]

    columns = ["method", "placement", "trains", "total", "GB (x base)", "s/iter (x base)", "spread"]
    columns += ["x Llama Pro"]
    training = [
        [
            row["label"],
            row["placement"] or "",
            *(_count(row[name]) for name in ("params_trainable", "params_total")),
            cell(row, "train_gb", 1),
            cell(row, "train_s_per_iter", 3),
            with_ratio(row["train_s_spread"], None, 3),
            _times(ratio_of(row, dus, "train_s_per_iter")),
            *printed(row, "params_trainable", "params_total", "train_gb", "train_s_per_iter"),
        ]
        for row in rows
    ]
    marked = ["paper: trains, B", "total, B", "GB", "s/iter"] if paper_target else []
    _print("training, median of an iteration", columns, marked, training)
    prompts = list(dict.fromkeys(key for row in rows for key in row["prefill_ms"]))
    columns = ["method", "GB (x base)", "eager tok/s", "compiled tok/s", "generate_fast tok/s"]
    has_other = any(row.get("decode_hf_compiled_tok_s") for row in rows)
    columns += ["HF compiled tok/s"] if has_other else []
    columns += [f"prefill {int(prompt):,} ms" for prompt in prompts] + ["KV bytes/token"]
    decoding = [
        [
            row["label"],
            cell(row, "infer_gb", 1),
            cell(row, "decode_eager_tok_s", 1),
            cell(row, "decode_compiled_tok_s", 1),
            cell(row, "generate_fast_tok_s", 1),
            *([cell(row, "decode_hf_compiled_tok_s", 1)] if has_other else []),
            *(cell(row, "prefill_ms", 2, prompt) for prompt in prompts),
            with_ratio(row["kv_cache_bytes_per_token"], None, 0),
            *printed(row, "infer_gb", "decode_tok_s"),
        ]
        for row in rows
    ]
    marked = ["paper: GB", "tok/s"] if paper_target else []
    _print("inference, batch 1 (x base)", columns, marked, decoding)
    if paper_target:
        note = (
            "the paper measured one NVIDIA RTX 6000 Blackwell"
            if any(papers.values())
            else f"the paper has no figures for {paper_target}"
        )
        console.out.print(note, style="dim")


def print_prefill(rows: list[Row]) -> None:
    """Milliseconds, change against Llama Pro, and peak memory, prompts down."""
    dus = find_row(rows, "llama_pro")
    prompts = list(dict.fromkeys(key for row in rows for key in row["prefill_ms"]))
    labels = [row["label"] for row in rows]
    for title, column in (("prefill, median ms", "prefill_ms"), ("peak GB", "prefill_gb")):
        lines = [
            [f"{int(p):,}", *(with_ratio(value_of(row, column, p), None, 2) for row in rows)]
            for p in prompts
        ]
        if any(value_of(row, column, p) is not None for row in rows for p in prompts):
            _print(title, ["tokens", *labels], [], lines)
    if dus is not None:
        lines = [
            [f"{int(p):,}", *(_signed(difference_of(row, dus, "prefill_ms", p)) for row in rows)]
            for p in prompts
        ]
        _print("change against DUS (Llama Pro), ms", ["tokens", *labels], [], lines)


def print_sweep(rows: list[Row], over: str) -> None:
    """Training time and memory over one setting, and inference where it was measured."""
    columns = ["method", over, "s/iter", "spread", "GB", "tokens/s"]
    infers = any(row["prefill_ms"] for row in rows)
    if infers:
        columns += ["compiled tok/s", "prefill ms"]
    lines = []
    for row in rows:
        seconds, tokens = row["train_s_per_iter"], row["train_tokens_per_iter"]
        line = [row["label"], str(row["value"]), with_ratio(seconds, None, 3)]
        line += [with_ratio(row["train_s_spread"], None, 3), with_ratio(row["train_gb"], None, 1)]
        line += [with_ratio(tokens / seconds if seconds else None, None, 0)]
        if infers:
            line += [with_ratio(row["decode_compiled_tok_s"], None, 1)]
            line += [" ".join(f"{ms:.2f}" for ms in row["prefill_ms"].values()) or "-"]
        lines.append(line)
    _print(f"training over {over}", columns, [], lines)


def print_decode(rows: list[Row]) -> None:
    """Tokens a second of all sequences together, by batch and context."""
    columns = ["method", "context", "batch", "eager tok/s", "compiled tok/s", "eager GB"]
    columns += ["compiled GB", "KV MB"]
    lines = []
    for row in rows:
        same = [r for r in rows if (r["batch"], r["context"]) == (row["batch"], row["context"])]
        base = find_row(same, "base")
        cells = [
            with_ratio(row[name], ratio_of(row, base, name), 1)
            for name in ("decode_eager_tok_s", "decode_compiled_tok_s")
        ]
        sizes = [with_ratio(row.get(name), None, 2) for name in ("eager_gb", "compiled_gb")]
        size = row.get("kv_cache_bytes")
        sizes.append("-" if size is None else f"{size / 1e6:,.2f}")
        lines.append([row["label"], f"{row['context']:,}", f"{row['batch']:,}", *cells, *sizes])
    _print("decoding (x base)", columns, [], lines)


def _count(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 1e9:.2f}B" if number >= 1e8 else f"{number:,}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _print(title: str, columns: list[str], paper: list[str], lines: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate([*columns, *paper]):
        table.add_column(
            column,
            justify="left" if index == 0 else "right",
            style="dim" if index >= len(columns) else "",
            no_wrap=True,
        )
    for line in lines:
        table.add_row(*line)
    # A table that is wider than the terminal is better than numbers cut in two.
    table.width = Measurement.get(
        console.out, console.out.options.update(width=1000), table
    ).maximum
    console.out.print(table)

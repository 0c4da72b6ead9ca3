"""Measured results as Markdown, between markers in the documents that show them.

Each block is made from a result file alone, so that a test can tell whether a document still says
what was measured.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midus.efficiency.goals import GOALS
from midus.efficiency.paper import PAPER, paper_row
from midus.efficiency.ratios import (
    Row,
    difference_of,
    find_row,
    noise_of,
    ratio_of,
    value_of,
    with_ratio,
)
from midus.errors import MidusError

Result = dict[str, Any]

_SHAPE = "llama-3.1-8b"
_HEADLINE = f"efficiency-{_SHAPE}"
_PROMPT = "2048"


def headline_table(result: Result) -> str:
    """The README's table: parameters, training, decoding and prefill, with ratios."""
    rows = result["rows"]
    base, dus = find_row(rows, "base"), find_row(rows, "llama_pro")
    lines = [
        [
            row["label"],
            f"{_billions(row, 'params_trainable')} / {_billions(row, 'params_total')}",
            _cell(row, "train_gb", 1),
            _cell(row, "train_s_per_iter", 2, dus),
            _cell(row, "decode_compiled_tok_s", 1, base),
            _cell(row, "prefill_ms", 1, base, _PROMPT),
        ]
        for row in rows
    ]
    heads = ["", "params, B: trained / all", "train GB", "train s/iter (x Llama Pro)"]
    heads += ["decode tok/s (x base)", "prefill 2,048, ms (x base)"]
    return _markdown(heads, lines) + "\n\n" + conditions_line(result)


def efficiency_table(result: Result) -> str:
    """Everything an efficiency result holds, with the paper's figures in columns of their own."""
    rows, target = result["rows"], result["protocol"]["base"]
    base, dus = find_row(rows, "base"), find_row(rows, "llama_pro")
    prompts = _prompts(rows)
    heads = ["", "placement", "params, B: trained / all", "train GB", "train s/iter (x Llama Pro)"]
    heads += ["spread, s", "infer GB", "eager tok/s (x base)", "compiled tok/s (x base)"]
    # Earlier results took it as a difference of two generations, which noise can turn around.
    has_fast = any("generate_fast_spread" in row for row in rows)
    heads += ["generate_fast tok/s (x base)"] if has_fast else []
    has_other = any(row.get("decode_hf_compiled_tok_s") for row in rows)
    heads += ["transformers' compiled tok/s"] if has_other else []
    heads += [f"prefill {int(prompt):,}, ms (x base)" for prompt in prompts]
    has_paper = target in PAPER
    if has_paper:
        heads += ["paper: GB train / infer", "paper: s/iter", "paper: tok/s"]
    lines = []
    for row in rows:
        line = [
            row["label"],
            row["placement"] or "",
            f"{_billions(row, 'params_trainable')} / {_billions(row, 'params_total')}",
            _cell(row, "train_gb", 1),
            _cell(row, "train_s_per_iter", 2, dus),
            _cell(row, "train_s_spread", 3),
            _cell(row, "infer_gb", 1),
            _cell(row, "decode_eager_tok_s", 1, base),
            _cell(row, "decode_compiled_tok_s", 1, base),
            *([_cell(row, "generate_fast_tok_s", 1, base)] if has_fast else []),
            *([_cell(row, "decode_hf_compiled_tok_s", 1)] if has_other else []),
            *(_cell(row, "prefill_ms", 1, base, prompt) for prompt in prompts),
        ]
        if has_paper:
            known = paper_row(target, row)
            line += (
                [
                    f"{known.train_gb:g} / {_plain(known.infer_gb)}",
                    _plain(known.train_s_per_iter),
                    _plain(known.decode_tok_s),
                ]
                if known
                else ["", "", ""]
            )
        lines.append(line)
    return _markdown(heads, lines) + "\n\n" + conditions_line(result)


def goals_table(result: Result, paired: Result | None = None) -> str:
    """What was set out for, what came of it, and what nothing could beat.

    Args:
        result: Of `midus bench efficiency`.
        paired: Of eager decoding in turns, whose ratio counts where it is there.
    """
    lines = []
    for goal in GOALS:
        value = goal.reached(result["rows"])
        if paired and goal.column == "decode_eager_tok_s":
            value = next(row["ratio"] for row in paired["rows"] if row["memory"] == "hml")
        verdict = "-" if value is None else "yes" if goal.is_met(value) else "no"
        sign = "≥" if goal.at_least else "≤"
        lines.append(
            [
                goal.text,
                f"{sign} {goal.goal:g}",
                "-" if value is None else f"{value:.3g}",
                verdict,
                _plain(goal.limit),
                _plain(goal.paper),
            ]
        )
    heads = ["MIDUS HML", "goal", "measured", "met", "limit", "paper (RTX 6000 Blackwell)"]
    return _markdown(heads, lines)


def prefill_table(result: Result) -> str:
    """Milliseconds by prompt length, with the change against Llama Pro beside."""
    rows = result["rows"]
    dus = find_row(rows, "llama_pro")
    lines = []
    for prompt in _prompts(rows):
        line = [f"{int(prompt):,}"]
        for row in rows:
            change = difference_of(row, dus, "prefill_ms", prompt)
            beside = "" if change is None or row is dus else f" ({change:+.1f})"
            line.append(_cell(row, "prefill_ms", 1, key=prompt) + beside)
        lines.append(line)
    heads = ["tokens", *(f"{row['label']}, ms" for row in rows)]
    return _markdown(heads, lines) + "\n\n" + conditions_line(result)


def sweep_table(result: Result) -> str:
    """Training time and memory, the setting's values down and methods across."""
    rows = result["rows"]
    over = rows[0]["over"]
    heads = ["", over, "s/iter", "train GB", "compiled tok/s", "prefill, ms"]
    lines = [
        [
            row["label"],
            f"{row['value']:,}" if isinstance(row["value"], int) else str(row["value"]),
            _cell(row, "train_s_per_iter", 3),
            _cell(row, "train_gb", 1),
            _cell(row, "decode_compiled_tok_s", 1),
            *([_cell(row, "prefill_ms", 1, key=prompt) for prompt in row["prefill_ms"]] or ["-"]),
        ]
        for row in rows
    ]
    if not any(row["prefill_ms"] for row in rows):
        heads, lines = heads[:4], [line[:4] for line in lines]
    return _markdown(heads, lines) + "\n\n" + conditions_line(result)


def decode_table(result: Result) -> str:
    """Tokens a second of all sequences together, by context and batch."""
    lines = []
    for row in result["rows"]:
        peers = [
            r
            for r in result["rows"]
            if (r["batch"], r["context"]) == (row["batch"], row["context"])
        ]
        base = find_row(peers, "base")
        size = row.get("kv_cache_bytes")
        lines.append(
            [
                row["label"],
                f"{row['context']:,}",
                f"{row['batch']:,}",
                _cell(row, "decode_eager_tok_s", 1, base),
                _cell(row, "decode_compiled_tok_s", 1, base),
                _cell(row, "compiled_gb", 1),
                "-" if size is None else f"{size / 1e9:.2f}",
            ]
        )
    heads = ["", "context", "batch", "eager tok/s (x base)", "compiled tok/s (x base)"]
    heads += ["compiled GB", "KV cache GB"]
    return _markdown(heads, lines) + "\n\n" + conditions_line(result)


def eager_table(result: Result) -> str:
    """What the host's speed decides: training steps and decoding that Python launches."""
    columns = {"s/iter": ("train_s_per_iter", 3), "eager tok/s": ("decode_eager_tok_s", 1)}
    rows = result["rows"]
    shown = {
        head: column
        for head, column in columns.items()
        if any(row[column[0]] is not None for row in rows)
    }
    base = find_row(rows, "base")
    lines = [
        [row["label"], *(_cell(row, *column, base) for column in shown.values())] for row in rows
    ]
    heads = ["", *(f"{head} (x base)" for head in shown)]
    if any(row.get("decode_eager_runs") for row in rows):
        # Others on a shared machine can only slow a run down.
        heads.append("fastest repeat, tok/s (x base)")
        for line, row in zip(lines, rows, strict=True):
            own, reference = _fastest(row), _fastest(base)
            ratio = own / reference if own and reference else None
            line.append(with_ratio(own, ratio, 1))
    return _markdown(heads, lines) + "\n\n" + conditions_line(result)


def paired_table(result: Result) -> str:
    """Eager decoding of methods that took turns: ratios within a round, and their quartiles."""
    lines = []
    for row in result["rows"]:
        low, high = row["ratio_quartiles"]
        lines.append(
            [
                row["label"],
                f"{row['decode_eager_tok_s']:.1f}",
                f"{row['fastest_tok_s']:.1f}",
                f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})",
            ]
        )
    heads = ["", "tok/s, median", "fastest", "x base in a round, median (quartiles)"]
    return _markdown(heads, lines) + "\n\n" + conditions_line(result)


def _fastest(row: Row | None) -> float | None:
    return max((row or {}).get("decode_eager_runs") or [], default=None)


def conditions_line(result: Result) -> str:
    """Command, hardware, versions, commit and date of a result."""
    versions = result["versions"]
    return (
        f"`{result['command']}` on {result['hardware']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, commit `{result['commit']}`, "
        f"{result['date'][:10]}."
    )


_KINDS: dict[str, Callable[[Result], str]] = {
    "efficiency": efficiency_table,
    "repeat": efficiency_table,  # another run of it, by which nothing else is made
    "prefill": prefill_table,
    "sweep": sweep_table,
    "decode": decode_table,
    "eager": eager_table,
    "paired": paired_table,
}


def blocks_of(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The README's blocks and the result page's, by marker.

    Args:
        folder: Result files: ``efficiency-<shape>.json``, ``repeat-``, ``prefill-``, ``sweep-``,
            ``decode-``, ``eager-`` and ``paired-``.
    """
    page: dict[str, str] = {}
    readme: dict[str, str] = {}
    for kind, table in _KINDS.items():
        for path in sorted(folder.glob(f"{kind}-*.json")):
            result = json.loads(path.read_text())
            page[path.stem] = table(result)
            if path.stem == _HEADLINE:
                readme["efficiency"] = headline_table(result)
                in_turns = folder / f"paired-{_SHAPE}.json"
                paired = json.loads(in_turns.read_text()) if in_turns.exists() else None
                page["goals"] = goals_table(result, paired)
    return readme, page


def markers_of(text: str) -> list[str]:
    """Names of the blocks a document has places for."""
    begins = [part.split(":begin -->")[0] for part in text.split("<!-- ")[1:]]
    return [name for name in begins if f"<!-- {name}:begin -->" in text]


def replace_blocks(text: str, blocks: dict[str, str]) -> str:
    """A document with every block between ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    for name in markers_of(text):
        if name not in blocks:
            if name.split("-")[0] in _KINDS:
                raise MidusError(
                    f"the block {name!r} has no result file; measure it or take the markers out"
                )
            continue
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise MidusError(f"{begin} has no {end} after it; add it")
        text = f"{before}{begin}\n{blocks[name]}\n{end}{after}"
    return text


def _prompts(rows: list[Row]) -> list[str]:
    return sorted({prompt for row in rows for prompt in row["prefill_ms"]}, key=int)


def _cell(
    row: Row, column: str, digits: int, reference: Row | None = None, key: str | None = None
) -> str:
    value = value_of(row, column, key)
    if value is None and _ran_out(row, column, key):
        return "out of memory"
    noise = noise_of(row, column, key)
    if value is not None and noise is not None:
        return f"{value:,.{digits}f} ± {noise:,.{digits}f}"
    return with_ratio(value, ratio_of(row, reference, column, key), digits)


def _ran_out(row: Row, column: str, key: str | None) -> bool:
    phase = {
        "train_gb": "train",
        "train_s_per_iter": "train",
        "prefill_ms": f"prefill {key}",
        "compiled_gb": "decode_compiled",
    }.get(column, column.removesuffix("_tok_s"))
    return phase in row["oom"]


def _billions(row: Row, column: str) -> str:
    value = row[column]
    return "-" if value is None else f"{value / 1e9:.2f}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _markdown(heads: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *lines))

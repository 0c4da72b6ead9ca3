"""Pictures of results, one beside each JSON file."""

from pathlib import Path
from typing import Any

from midus.efficiency.ratios import difference_of, find_row, value_of
from midus.plot_style import DARK, GREY, LIGHT, STYLE, WARM
from midus.training.recipes import RUN_RECIPES

Row = dict[str, Any]

_DECODERS = {"decode_compiled_tok_s": "-", "decode_eager_tok_s": "--"}
_BASE, _COPY, _MEMORY, _HML = GREY, LIGHT, DARK, WARM


def plot_efficiency(rows: list[Row], path: Path, title: str) -> None:
    """Bars of training time, training memory, decoding and prefill, one colour a kind of method."""
    prompts = {prompt for row in rows for prompt in row["prefill_ms"]}
    prompt = "2048" if "2048" in prompts else max(prompts, key=int, default=None)
    panels: list[tuple[str, str, str | None]] = [
        ("Training, s/iter", "train_s_per_iter", None),
        ("Training, peak GB", "train_gb", None),
        ("Decoding, eager tok/s", "decode_eager_tok_s", None),
        ("Decoding, compiled tok/s", "decode_compiled_tok_s", None),
    ]
    if prompt:
        panels.append((f"Prefill of {int(prompt):,}, ms", "prefill_ms", prompt))
    drawn = [
        panel
        for panel in panels
        if any(value_of(row, panel[1], panel[2]) is not None for row in rows)
    ]
    with _figure(path, title, max(len(drawn), 1), (3.0, 0.32 * len(rows) + 1.4)) as axes:
        for place, (name, column, key) in zip(axes, drawn, strict=False):
            _bars(place, rows, name, column, key)
        for place in axes[1:]:
            place.set_yticklabels([])


def plot_prefill(rows: list[Row], path: Path, title: str) -> None:
    """Change in prefill time against DUS over prompt length, the paper's figure; and the times."""
    dus = find_row(rows, "llama_pro")
    with _figure(path, title, 2, (5.0, 3.6)) as axes:
        for row in rows:
            prompts = sorted(map(int, row["prefill_ms"]))
            times = [row["prefill_ms"][str(p)] for p in prompts]
            axes[1].plot(prompts, times, marker="o", markersize=3, **_line(row))
            changes = [(p, difference_of(row, dus, "prefill_ms", str(p))) for p in prompts]
            known = [(p, change) for p, change in changes if change is not None]
            if known and row is not dus:
                axes[0].plot(*zip(*known, strict=True), marker="o", markersize=3, **_line(row))
        measured = sorted({int(prompt) for row in rows for prompt in row["prefill_ms"]})
        axes[0].axhline(0, color="black", linewidth=0.8)
        axes[0].set(xscale="log", xlabel="prompt, tokens", ylabel="ms")
        axes[0].set_title("Change against DUS (Llama Pro)")
        axes[1].set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="ms")
        axes[1].set_title("Prefill time")
        for axis in axes:
            _plain_ticks(axis, measured)
        _legend(axes[1])


def plot_sweep(rows: list[Row], path: Path, title: str) -> None:
    """Training time and memory over the setting, one line a method; a cross: out of memory."""
    over = rows[0]["over"] if rows else ""
    panels = {"Training, s/iter": "train_s_per_iter", "Training, peak GB": "train_gb"}
    if not any(row["train_gb"] is not None for row in rows):
        del panels["Training, peak GB"]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        own = None if over == "placement" else row["placement"]
        groups.setdefault((row["method"], row["memory"], own), []).append(row)
    values = list(dict.fromkeys(_swept_value(row) for row in rows))
    with _figure(path, title, len(panels), (5.0, 3.6)) as axes:
        for axis, (name, column) in zip(axes, panels.items(), strict=True):
            for group in groups.values():
                style = _line(group[0], short=over == "placement")
                places = [values.index(_swept_value(row)) for row in group]
                figures = [_or_nan(row[column]) for row in group]
                axis.plot(places, figures, marker="o", markersize=4, **style)
                lost = [
                    place for place, row in zip(places, group, strict=True) if "train" in row["oom"]
                ]
                if lost:  # nothing drawn outside the axes would have no place, nor any layout
                    axis.plot(lost, [0] * len(lost), "x", color=style["color"], clip_on=False)
            axis.set(xlabel=over, ylim=(0, None), xticks=range(len(values)), xticklabels=values)
            axis.set_title(name)
        _legend(axes[0])


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:  # nothing was measured: matplotlib would complain
        axis.legend(fontsize=8)


def _swept_value(row: Row) -> str:
    # One anchor schedule under two names: its copies stand after, its memory blocks before.
    is_copies = row["memory"] is None
    return "distributed" if is_copies and row["value"] == "llama_pro" else str(row["value"])


def plot_decode(rows: list[Row], path: Path, title: str) -> None:
    """Tokens a second over batch sizes; compiled in full lines, eager in dashed ones."""
    contexts = list(dict.fromkeys(row["context"] for row in rows)) or [0]
    with _figure(path, title, len(contexts), (4.6, 3.6)) as axes:
        for place, context in zip(axes, contexts, strict=True):
            for method in dict.fromkeys(row["label"] for row in rows):
                mine = [r for r in rows if r["label"] == method and r["context"] == context]
                for column, dash in _DECODERS.items():
                    known = [(r["batch"], r[column]) for r in mine if r[column] is not None]
                    if not known:
                        continue
                    style = {**_line(mine[0]), "linestyle": dash}
                    style["label"] = method if dash == "-" else None
                    place.plot(*zip(*known, strict=True), marker="o", markersize=4, **style)
            place.set(xscale="log", yscale="log", xlabel="batch", ylabel="tokens/s")
            _plain_ticks(place, sorted({row["batch"] for row in rows}))
            place.set_title(f"{context:,} tokens in the cache (dashed: eager)")
        _legend(axes[0])


def _bars(axes: Any, rows: list[Row], name: str, column: str, key: str | None) -> None:
    values = [value_of(row, column, key) for row in rows]
    places = range(len(rows))
    axes.barh(places, [value or 0 for value in values], color=[_colour(row) for row in rows])
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        phase = f"prefill {key}" if key else column.removesuffix("_tok_s")
        is_oom = (phase if phase.startswith(("prefill", "decode")) else "train") in row["oom"]
        text = f"{value:,.3g}" if value is not None else "out of memory" if is_oom else "-"
        axes.text(value or 0, place, f" {text}", va="center", fontsize=8)
    axes.set(yticks=list(places), yticklabels=[row["label"] for row in rows])
    axes.set_xlim(0, 1.25 * max((value or 0 for value in values), default=1) or 1)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_title(name)


def _plain_ticks(axes: Any, values: list[int]) -> None:
    """The measured values under a logarithmic axis, written out; past 4,096 in units of 1,024."""
    labels = [f"{value // 1024}k" if value >= 4096 else str(value) for value in values]
    axes.set_xticks(values, labels)
    axes.set_xticks([], minor=True)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _line(row: Row, short: bool = False) -> dict[str, Any]:
    style = {"top_heavy": ":", "bottom_heavy": "-."}.get(row["placement"], "-")
    label = row["label"].split(" (")[0] if short else row["label"]
    styles = {"linear": "--", "pkm": ":", "ultramem": "-."}
    styles |= dict(zip(RUN_RECIPES, ("--", "-.", ":"), strict=True))
    return {
        "label": label,
        "color": _colour(row),
        "linestyle": "-" if short else styles.get(row["memory"] or "", style),
    }


def _colour(row: Row) -> str:
    if row["memory"] == "hml" or row["memory"] in RUN_RECIPES:
        return _HML
    if row["memory"]:
        return _MEMORY
    return _BASE if row["method"] == "base" else _COPY


class _figure:
    """A row of panels, written as a PNG at the end."""

    def __init__(self, path: Path, title: str, num_panels: int, size: tuple[float, float]) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        self._path = path
        self._style = rc_context(STYLE)
        self._style.__enter__()
        self._figure = Figure(figsize=(size[0] * num_panels, size[1]), layout="constrained")
        self._axes = self._figure.subplots(1, num_panels, squeeze=False)[0]
        self._figure.suptitle(title, x=0.01, ha="left", fontsize=11)

    def __enter__(self) -> Any:
        return self._axes

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._figure.savefig(self._path, dpi=130)
        self._style.__exit__(*error)

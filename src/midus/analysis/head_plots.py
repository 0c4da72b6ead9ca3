"""The paper's figure of head importance: base, grown model, variance over heads (``heads.png``)."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

# The colour scale ends here, so that one outstanding head does not darken all others.
_TOP_QUANTILE = 0.99
_LAYER = "layer of the base"
_COLOURS = {"base": "#4c566a", "model": "#d1495b", "memory": "#7b2d8b", "copy": "#1b7f9e"}


class _Heatmap(NamedTuple):
    title: str
    layers: list[dict[str, Any]]
    scores: torch.Tensor  # [L, H]

    @property
    def inserted_kind(self) -> str | None:
        kind: str = self.layers[0]["kind"]
        return None if kind == "base" else kind


def plot_heads(values: dict[str, Any], path: Path, model: str) -> None:
    """Heatmaps of layers by heads, and the variance of each layer, as a PNG.

    Base and grown model share one colour scale. Scores of inserted blocks, where they are far
    smaller, are multiplied by what their heading says.

    Args:
        values: What ``compare_heads`` returns and ``heads.json`` holds.
        path: File to write.
        model: Name of the model, for the headings.
    """
    from matplotlib.figure import Figure

    layers, scores = values["layers"]["model"], torch.tensor(values["importance"]["model"])
    own = [layer for layer in layers if layer["kind"] == "base"]
    inserted = [layer for layer in layers if layer["kind"] != "base"]
    heatmaps = [_Heatmap(f"(b) model: {_short(model)}", own, scores[_indices(own)])]
    if values["base"]:
        base = torch.tensor(values["importance"]["base"])
        title = f"(a) base: {_short(values['base']['model'])}"
        heatmaps.insert(0, _Heatmap(title, values["layers"]["base"], base))
    else:
        heatmaps = [heatmaps[0]._replace(title=f"(a) {_short(model)}")]
    everything = torch.cat([heatmap.scores for heatmap in heatmaps])
    top = max(everything.quantile(_TOP_QUANTILE).item(), 1e-30)
    if inserted:
        heatmaps.append(_inserted_heatmap(inserted, scores[_indices(inserted)], top))

    width = min(max(0.24 * scores.shape[1], 2.4), 3.6)
    widths = [*[width] * len(heatmaps), 4.8]
    figure = Figure(figsize=(sum(widths) + 0.6 * len(widths), 5.8), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)  # type: ignore[union-attr,call-arg]
    *axes, variance_axes = figure.subplots(1, len(widths), width_ratios=widths)
    for ax, heatmap in zip(axes, heatmaps, strict=True):
        image = _draw_heatmap(ax, heatmap, top)
    axes[0].set_ylabel(_LAYER if inserted else "layer")
    bar = figure.colorbar(
        image, ax=axes, location="bottom", extend="max", pad=0.02, aspect=45, shrink=0.85
    )
    bar.set_label(
        f"{_score(values)}\nsquare-root colours up to {top:.3g}, "
        f"the {100 * _TOP_QUANTILE:.0f}th percentile"
    )
    bar.outline.set_visible(False)
    _draw_variance(variance_axes, values, own, inserted)
    figure.suptitle(
        f"Head importance on {values['num_examples']:,} examples of {values['task']}, zero-shot",
        fontsize=13,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=150)


def _inserted_heatmap(inserted: list[dict[str, Any]], scores: torch.Tensor, top: float) -> _Heatmap:
    largest = scores.quantile(_TOP_QUANTILE).item()
    room = top / largest if largest > 0 else 1.0
    steps = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    factor = max((step for step in steps if step <= room), default=1)
    shown = f", shown {factor:,}-fold" if factor > 1 else ""
    return _Heatmap(f"its {len(inserted)} {_blocks(inserted)}{shown}", inserted, scores * factor)


def _draw_heatmap(ax: Any, heatmap: _Heatmap, top: float) -> Any:
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=top)
    image = ax.imshow(heatmap.scores.numpy(), aspect="auto", cmap="magma", norm=norm)
    num_rows, num_heads = heatmap.scores.shape
    # Thin lines between cells, so that single heads can be followed across panels.
    ax.set_xticks([i - 0.5 for i in range(1, num_heads)], minor=True)
    ax.set_yticks([i - 0.5 for i in range(1, num_rows)], minor=True)
    ax.grid(which="minor", color="white", linewidth=0.4)
    ax.tick_params(which="both", length=0)
    ax.set_xticks(_every(num_heads, 10))
    rows = _every(num_rows, 16)
    kind = heatmap.inserted_kind
    word = {"memory": "before ", "copy": "from "}.get(kind or "", "")
    ax.set_yticks(rows, [f"{word}{heatmap.layers[i]['base_index']}" for i in rows])
    ax.set_xlabel("head")
    ax.set_title(heatmap.title, fontsize=10.5, loc="left")
    for spine in ax.spines.values():
        spine.set_visible(False)
    if kind:
        ax.tick_params(axis="y", colors=_COLOURS[kind])
        ax.title.set_color(_COLOURS[kind])
        ax.spines[:].set(visible=True, color=_COLOURS[kind], linewidth=2)
    return image


def _draw_variance(
    ax: Any, values: dict[str, Any], own: list[dict[str, Any]], inserted: list[dict[str, Any]]
) -> None:
    def draw(layers: list[dict[str, Any]], of: str, style: str, colour: str, label: str) -> None:
        variances = values["variance"][of]
        points = [(layer["base_index"], variances[layer["index"]]) for layer in layers]
        ax.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4.5)

    if values["base"]:
        draw(values["layers"]["base"], "base", "o-", _COLOURS["base"], "base")
    draw(own, "model", "s-", _COLOURS["model"], "model" + ", layers of the base" * bool(inserted))
    if inserted:
        colour = _COLOURS[inserted[0]["kind"]]
        draw(inserted, "model", "D", colour, f"model, {_blocks(inserted)}, at their anchors")
    ax.set_yscale("log")
    ax.set(xlabel=_LAYER if inserted else "layer", ylabel=f"variance of {_score(values)}")
    letter = "c" if values["base"] else "b"
    ax.set_title(f"({letter}) variance over the heads of a layer", fontsize=10.5, loc="left")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    if values["base"] or inserted:
        ax.legend(framealpha=0.9, edgecolor="none", fontsize=9)


def _indices(layers: list[dict[str, Any]]) -> list[int]:
    return [layer["index"] for layer in layers]


def _score(values: dict[str, Any]) -> str:
    name = "IS" if values["reduction"] == "example" else "token-wise IS"
    unit = "nats" if values["loss"] == "sum" else "nats a token"
    return f"{name}, a layer's L2 norm 1" if values["layer_norm"] else f"{name} ({unit})"


def _blocks(inserted: list[dict[str, Any]]) -> str:
    return "memory blocks" if inserted[0]["kind"] == "memory" else "copied blocks"


def _every(count: int, at_most: int) -> list[int]:
    steps = (1, 2, 4, 5, 8, 10, 16, 20, 32, 50)
    return list(range(0, count, next((s for s in steps if count <= s * at_most), count)))


def _short(name: str) -> str:
    return "/".join(Path(name).parts[-2:])

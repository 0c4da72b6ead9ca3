"""The picture of `analyze_slots`: use, overlap and values of the memory blocks (``slots.png``)."""

from pathlib import Path
from typing import Any

from midus.analysis.slots import BlockSlots, SlotsReport
from midus.plot_style import DARK, LIGHT, STYLE, WARM

_NUM_CURVES = 5


def plot_slots(report: SlotsReport, path: Path, title: str) -> None:
    """Six panels as a PNG.

    Args:
        report: What was found.
        path: File to write.
        title: Over the picture.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(13.5, 7.4), layout="constrained")
        axes = figure.subplots(2, 3)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        _plot_use(axes[0, 0], report.blocks)
        _plot_ranks(axes[0, 1], report.blocks)
        _plot_corrections(axes[0, 2], report)
        _plot_mean_overlap(axes[1, 0], report.blocks)
        _plot_overlap(figure, axes[1, 1], report.busiest_block)
        _plot_norms(axes[1, 2], report.blocks)
        figure.savefig(path, dpi=130)


def _plot_use(axes: Any, blocks: list[BlockSlots]) -> None:
    places = _block_axis(axes, blocks)
    axes.bar(places, [100 * b.used for b in blocks], color=LIGHT, label="slots used")
    marks = {"marker": "o", "markersize": 4, "linewidth": 1.3}
    axes.plot(
        places, [100 * b.entropy for b in blocks], color=DARK, label="entropy of choices", **marks
    )
    weighted = [100 * b.weighted_entropy for b in blocks]
    axes.plot(places, weighted, color=WARM, label="weighted entropy", **marks)
    axes.set(ylim=(0, 118), yticks=range(0, 101, 20), ylabel="% of the largest possible")
    axes.set_title("Use of slots")
    axes.legend(loc="upper left", ncols=3, fontsize=8, columnspacing=1.0, handlelength=1.4)


def _plot_ranks(axes: Any, blocks: list[BlockSlots]) -> None:
    for block, colour in _some(blocks):
        curve = block.rank_frequency
        axes.plot(curve["rank"], curve["share"], color=colour, label=f"block {block.index}")
    num_pairs = blocks[0].num_heads * blocks[0].num_slots
    axes.axhline(1 / num_pairs, color="grey", linewidth=1, linestyle=":", label="all alike")
    axes.set(xscale="log", yscale="log", xlabel="rank of the (head, slot) pair")
    axes.set(ylabel="share of the choices")
    axes.set_title("How choices fall on slots")
    axes.legend(loc="lower left", fontsize=8)


def _plot_corrections(axes: Any, report: SlotsReport) -> None:
    blocks = report.blocks
    ratios = [100 * b.correction_ratio for b in blocks]
    bars = axes.bar(_block_axis(axes, blocks), ratios, color=DARK)
    chosen = bars[blocks.index(report.busiest_block)]
    chosen.set(color=WARM, label=f"block {report.busiest['block']}, whose slots are described")
    _leave_room(axes, ratios)
    axes.set_ylabel("mean ‖correction‖ / ‖x‖, %")
    axes.set_title("Size of the corrections")
    axes.legend(handles=[chosen], loc="upper right", fontsize=8)


def _plot_mean_overlap(axes: Any, blocks: list[BlockSlots]) -> None:
    places = _block_axis(axes, blocks)
    drawn: list[float] = []
    for name, label, colour in (
        ("jaccard", "Jaccard of used slots", DARK),
        ("cosine", "cosine of use", WARM),
    ):
        if blocks[0].num_heads == 1:  # nothing to overlap with
            continue
        means = [b.head_overlap[f"mean_{name}"] for b in blocks]
        chance = [b.head_overlap[f"chance_{name}"] for b in blocks]
        axes.plot(places, means, color=colour, marker="o", markersize=4, label=label)
        axes.plot(places, chance, color=colour, linestyle=":", linewidth=1.2, label="by chance")
        drawn += means + chance
    _leave_room(axes, drawn)
    axes.set_ylabel("mean over pairs of heads")
    axes.set_title("Overlap between heads")
    if drawn:
        axes.legend(loc="upper left", ncols=2, fontsize=8)


def _plot_overlap(figure: Any, axes: Any, block: BlockSlots) -> None:
    import numpy as np

    matrix = np.array(block.head_overlap["jaccard"])
    np.fill_diagonal(matrix, np.nan)
    image = axes.imshow(matrix, cmap="viridis", vmin=0)
    axes.grid(visible=False)
    step = max(1, len(matrix) // 8)
    ticks = range(0, len(matrix), step)
    axes.set(xticks=ticks, yticks=ticks, xlabel="head", ylabel="head")
    if 1 < len(matrix) <= 12:
        middle = 0.6 * np.nanmax(matrix)
        for (i, j), value in np.ndenumerate(matrix):
            if i != j:
                colour = "black" if value > middle else "white"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=7)
    axes.set_title(f"Jaccard of used slots, block {block.index}")
    figure.colorbar(image, ax=axes, shrink=0.9)


def _plot_norms(axes: Any, blocks: list[BlockSlots]) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

    for block, colour in _some(blocks):
        histogram, zeros = block.value_norms["histogram"], block.value_norms["zero_rows"]
        rest = f", {zeros:,} rows zero" if zeros else ""
        axes.stairs(
            histogram["counts"],
            histogram["edges"],
            color=colour,
            linewidth=1.5,
            label=f"block {block.index}{rest}",
        )
    axes.set(xscale="log", xlabel="norm of what a slot writes at weight 1")
    # Labels between powers of ten run into each other; a narrow range may hold no such power.
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim()
    if high < 10 * low:
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    axes.set_ylabel("(head, slot) pairs")
    axes.set_title("Norms of realised values")
    axes.legend(fontsize=8)


def _block_axis(axes: Any, blocks: list[BlockSlots]) -> list[int]:
    """Names the blocks under the axis; gives their places on it."""
    places = list(range(len(blocks)))
    step = -(-len(blocks) // 16)
    axes.set_xticks(places[::step], [str(b.index) for b in blocks][::step])
    axes.set_xlabel("memory block (index in the final stack)")
    axes.grid(visible=False, axis="x")
    return places


def _leave_room(axes: Any, values: list[float]) -> None:
    """From zero up, with room for the legend above what is drawn."""
    axes.set_ylim(0, 1.3 * max(values, default=0) or 1)


def _some(blocks: list[BlockSlots]) -> list[tuple[BlockSlots, Any]]:
    """A few blocks from bottom to top, each with its colour."""
    from matplotlib import colormaps

    num = min(_NUM_CURVES, len(blocks))
    last = max(1, num - 1)
    chosen = [blocks[round(i * (len(blocks) - 1) / last)] for i in range(num)]
    return [(block, colormaps["viridis"](0.88 * i / last)) for i, block in enumerate(chosen)]

"""The picture of `midus analyze theorem` (``theorem.png``)."""

from pathlib import Path
from typing import Any

from midus.plot_style import DARK, STYLE, WARM

_SHARED, _HIVE, _HEADWISE, _QUIET = WARM, DARK, "#35895b", "#8a8f98"


def plot_theorem(values: dict[str, Any], path: Path) -> None:
    """What heterogeneity costs and what rank HIVE needs, on random instances and on the model.

    Args:
        values: What ``theorem.json`` holds.
        path: File to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    model = values["model_check"]
    with rc_context({**STYLE, "legend.fontsize": 8.5}):
        rows = 2 if model else 1
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(11.5, 4.1 * rows), layout=layout)
        axes = figure.subplots(rows, 2, squeeze=False)
        _plot_heterogeneity(axes[0, 0], values["heterogeneity"])
        _plot_random_ranks(axes[0, 1], values["rank_curve"], values["near_rank_curve"])
        if model:
            _plot_model_ranks(axes[1, 0], model)
            _plot_own(axes[1, 1], model)
        figure.savefig(path, dpi=140)


def _plot_heterogeneity(axes: Any, curve: dict[str, list[float]]) -> None:
    axes.plot(
        curve["scale"],
        curve["formula"],
        color=_SHARED,
        label=r"formula: $\frac{1}{2}\sum_h\|\Pi_A(Y_h-\bar Y)\|^2$",
    )
    axes.plot(
        curve["scale"],
        curve["gap"],
        "o",
        color=_SHARED,
        markerfacecolor="white",
        label=r"measured: $L^*_\mathrm{Share}-L^*_\mathrm{Ind}$",
    )
    axes.set(xlabel="scale $s$ of what heads want for themselves: $Y_h = Y + s\\,Z_h$")
    axes.set(ylabel="gap, share of the loss without correction", ylim=(0, None), xlim=(-0.02, 1.02))
    axes.set_title("Random instance: what sharing costs unlike heads")
    axes.legend(loc="upper left")


def _plot_random_ranks(axes: Any, exact: dict[str, Any], near: dict[str, Any]) -> None:
    _levels(axes, exact)
    axes.plot(
        near["rank"],
        near["hive_loss"],
        color=_HIVE,
        alpha=0.55,
        linestyle="--",
        label="HIVE, banks with small parts of their own",
    )
    axes.plot(
        exact["rank"],
        exact["hive_loss"],
        color=_HIVE,
        marker="o",
        markersize=3.5,
        label=r"HIVE, $V_h^*=\bar V W_h$ as Theorem 1 asks",
    )
    axes.set_title("Random instance: HIVE's best loss by rank")
    axes.legend(loc="upper right")


def _plot_model_ranks(axes: Any, model: dict[str, Any]) -> None:
    common = model["common_retrieval"]
    curve = common["rank_curve"]
    _levels(axes, curve)
    axes.plot(curve["rank"], curve["hive_loss"], color=_HIVE, label="HIVE, targets as they are")
    axes.set_title(f"Block {model['block']}: head {common['head']}'s $A$ for all heads")
    axes.legend(loc="lower right")


def _levels(axes: Any, curve: dict[str, Any]) -> None:
    """The two other families as lines across, and the theorem's limit of the rank."""
    last = curve["rank"][-1]
    for level, name, colour, above in (
        (curve["shared_loss"], r"$L^*_\mathrm{Share}$", _SHARED, True),
        (curve["headwise_loss"], r"$L^*_\mathrm{Ind}$", _HEADWISE, False),
    ):
        axes.axhline(level, color=colour, linewidth=1.4)
        axes.annotate(
            f"{name} {level:.3f}",
            (last, level),
            xytext=(0, 3 if above else -4),
            textcoords="offset points",
            ha="right",
            va="bottom" if above else "top",
            color=colour,
        )
    if curve["head_width"] <= last:
        axes.axvline(curve["head_width"], color=_QUIET, linewidth=1, linestyle=":")
        axes.annotate(
            "$r = d_h$",
            (curve["head_width"], 0.42),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            va="center",
            color=_QUIET,
        )
    axes.set(xlabel="rank $r$ of the latent table", xlim=(0, last * 1.01), ylim=(-0.14, 1.14))
    axes.set(ylabel="loss, share of that without correction")


def _plot_own(axes: Any, model: dict[str, Any]) -> None:
    own = model["own_retrieval"]
    rows = [
        ("no correction", 1.0, _QUIET),
        ("one shared bank", own["shared_loss"], _SHARED),
        (f"HIVE, r = {model['head_width']}, at most", own["refitted_loss"], _HIVE),
        ("a bank for each head", own["headwise_loss"], _HEADWISE),
    ]
    places = range(len(rows))[::-1]
    axes.barh(places, [row[1] for row in rows], color=[row[2] for row in rows], height=0.55)
    for place, (name, loss, colour) in zip(places, rows, strict=True):
        axes.text(0.012, place + 0.32, name, va="bottom", color=colour)
        axes.text(loss + 0.012, place, f"{loss:.3f}", va="center", color=colour)
    axes.set(xlim=(0, 1.12), xlabel="loss, share of that without correction")
    axes.set(yticks=[], ylim=(-0.5, len(rows) - 0.3))
    axes.grid(visible=False, axis="y")
    axes.set_title(
        f"Block {model['block']}: every head's own $A_h$; {model['slots_read_by_several']:,} of "
        f"{model['slots_read']:,} slots shared"
    )

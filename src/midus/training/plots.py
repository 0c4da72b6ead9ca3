"""Pictures of a run."""

from pathlib import Path
from typing import Any


def plot_losses(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Training and held-out loss over the steps, as a PNG.

    Args:
        rows: Lines of ``metrics.jsonl``.
        path: File to write.
        title: Over the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in (
        ("loss", "training", {"color": "tab:blue", "alpha": 0.6}),
        ("eval_loss", "held-out", {"color": "tab:red", "marker": "o"}),
    ):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)

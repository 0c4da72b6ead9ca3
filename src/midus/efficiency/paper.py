"""The paper's efficiency figures: one NVIDIA RTX 6000 Blackwell, a column of their own beside ours.

Table "Efficiency for Llama-3.1-8B". Its table of placement policies times Llama-3.2-1B at another
batch size, which does not belong beside these.
"""

from typing import Any, NamedTuple


class PaperRow(NamedTuple):
    """One row of a table; None where the paper has no figure."""

    params_trainable: float | None
    """In 1e9, as printed."""
    params_total: float | None
    train_gb: float
    infer_gb: float | None
    train_s_per_iter: float
    decode_tok_s: float | None


# By shape, then by method, memory layer and placement.
PAPER: dict[str, dict[tuple[str, str | None, str | None], PaperRow]] = {
    "llama-3.1-8b": {
        ("base", None, None): PaperRow(8.03, 8.03, 81.6, 19.2, 6.12, 61.0),
        ("llama_pro", None, "llama_pro"): PaperRow(3.49, 11.52, 63.8, 27.0, 6.89, 41.3),
        ("opt_deus", None, "top_heavy"): PaperRow(3.49, 11.52, 59.8, 27.0, 5.78, 41.3),
        ("midus", "linear", "distributed"): PaperRow(1.48, 9.51, 51.3, 23.1, 11.05, 42.4),
        ("midus", "pkm", "distributed"): PaperRow(1.21, 9.24, 48.3, 22.5, 9.88, 47.3),
        ("midus", "ultramem", "distributed"): PaperRow(1.29, 9.32, 56.9, 23.6, 8.56, 36.9),
        ("midus", "hml", "distributed"): PaperRow(0.42, 8.45, 34.8, 20.1, 5.05, 50.5),
    },
}


def paper_row(target: str, row: dict[str, Any]) -> PaperRow | None:
    """The paper's figures for a row of ours, if it has them."""
    return PAPER.get(target, {}).get((row["method"], row["memory"], row["placement"]))

"""The paper's one-at-a-time tables, as printed: never ours, always under their own heading.

All are of MIDUS-HML on Llama-3.2-1B after CPT on FineWeb-Edu, WikiText perplexity, zero-shot
accuracies and their mean. Its comparisons of methods are in `midus.evaluation.paper`.
"""

from dataclasses import dataclass
from typing import Any

from midus.evaluation.paper import PaperRow
from midus.evaluation.suites import find_suite

_COLUMNS = [column.key for column in find_suite("general").columns]


@dataclass(frozen=True)
class PaperAblation:
    """What the paper varies in one table, with its figures."""

    title: str
    label: str
    """Of the table in the paper's source."""
    options: tuple[str, ...]
    """What of a run it varies, one at a time."""
    rows: dict[tuple[Any, ...], PaperRow]
    """By the values of those options."""


def _table(
    title: str, label: str, options: tuple[str, ...], rows: dict[tuple[Any, ...], str]
) -> PaperAblation:
    made = {}
    for values, text in rows.items():
        name, numbers = text.split(":")
        *scores, average = map(float, numbers.split())
        named = dict(zip(_COLUMNS, scores, strict=True))
        made[values] = PaperRow("Llama-3.2-1B", "CPT", name, named, average)
    return PaperAblation(title, label, options, made)


ABLATIONS = (
    _table(
        "Memory layers",
        "tab:memory_results",
        ("upscale.memory.kind", "upscale.memory.values"),
        {
            ("linear", "hive"): "Linear: 11.82 65.61 22.73 62.04 42.42 64.71 75.08 35.89 52.64",
            ("pkm", "hive"): "PKM: 11.97 65.70 21.35 61.40 42.18 65.47 74.65 33.93 52.10",
            ("ultramem", "hive"): "UltraMem: 11.64 66.46 21.81 61.09 44.31 64.83 75.63 36.49 52.94",
            ("hml", "hive"): "HML: 11.64 66.16 23.20 61.56 46.27 65.29 75.08 36.91 53.50",
        },
    ),
    _table(
        "Placement",
        "tab:dus_policy",
        ("upscale.placement",),
        {
            ("top_heavy",): "Top-heavy: 11.63 66.12 22.27 61.25 46.44 64.28 74.92 36.23 53.07",
            ("distributed",): "Distributed: 11.64 66.16 23.20 61.56 46.27 65.29 75.08 36.91 53.50",
            ("bottom_heavy",): (
                "Bottom-heavy: 11.60 66.12 21.81 60.30 45.05 65.05 75.30 36.35 52.85"
            ),
        },
    ),
    _table(
        "Slots",
        "tab:memory_count",
        ("upscale.memory.num_subkeys",),
        {
            (16,): "66K (n=16): 11.63 66.12 22.89 60.06 46.27 65.02 74.81 36.74 53.13",
            (32,): "262K (n=32): 11.64 65.95 23.35 60.85 47.17 65.44 74.76 36.41 53.42",
            (64,): "1M (n=64): 11.64 66.16 23.20 61.56 46.27 65.29 75.08 36.91 53.50",
        },
    ),
    _table(
        "Top-k",
        "tab:topk",
        ("upscale.memory.top_k",),
        {
            (1,): "1: 11.67 65.74 21.97 60.54 46.19 64.95 74.86 36.95 53.03",
            (2,): "2: 11.63 65.87 23.20 60.69 46.11 65.11 74.54 37.04 53.22",
            (4,): "4: 11.64 66.16 23.20 61.56 46.27 65.29 75.08 36.91 53.50",
            (8,): "8: 11.64 66.04 23.04 60.46 46.93 64.98 75.03 37.11 53.37",
        },
    ),
    _table(
        "Structure",
        "tab:ablations",
        (
            "upscale.memory.query_norm",
            "upscale.memory.attention_residual",
            "upscale.memory.attn_output_proj",
            "upscale.memory.memory_output_proj",
        ),
        {
            ("none", False, False, False): (
                "MIDUS-HML: 11.64 66.16 23.20 61.56 46.27 65.29 75.08 36.91 53.50"
            ),
            ("batch", False, False, False): (
                "w/ BatchNorm1d: 11.74 66.54 22.43 60.77 47.34 64.80 74.92 36.94 53.39"
            ),
            ("layer", False, False, False): (
                "w/ LayerNorm: 11.68 66.08 22.43 61.56 46.68 65.17 75.19 37.34 53.49"
            ),
            ("none", True, False, False): (
                "w/ Residual: 11.64 66.04 22.89 61.48 46.36 65.17 75.35 36.75 53.43"
            ),
            ("none", False, True, False): (
                "w/ Output Projection: 11.64 66.12 23.66 61.09 46.52 65.23 74.86 37.07 53.51"
            ),
        },
    ),
    _table(
        "Learning rate",
        "tab:lr_wd",
        ("optimizer.lr",),
        {
            (1e-4,): "1e-4: 11.64 66.16 23.20 61.56 46.27 65.29 75.08 36.91 53.50",
            (1e-5,): "1e-5: 11.64 65.57 21.51 61.01 46.85 63.58 74.48 37.12 52.87",
            (5e-5,): "5e-5: 11.63 66.46 22.89 60.14 47.58 64.86 74.54 37.23 53.39",
        },
    ),
    _table(
        "Weight decay",
        "tab:lr_wd",
        ("optimizer.weight_decay",),
        {
            (1e-6,): "1e-6: 11.64 66.16 23.20 61.56 46.27 65.29 75.08 36.91 53.50",
            (0.0,): "0: 11.64 66.25 21.97 60.77 46.60 65.32 75.03 36.99 53.27",
            (1e-2,): "1e-2: 11.62 65.78 23.04 59.91 45.45 65.35 74.81 37.25 53.09",
        },
    ),
)

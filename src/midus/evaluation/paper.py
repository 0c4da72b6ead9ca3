"""The paper's own numbers, as printed: never ours, always under their own heading."""

from dataclasses import dataclass
from typing import Any

from midus.evaluation.suites import find_suite
from midus.models.record import num_base_layers, record_of

_BACKBONES = {
    "Llama-3.2-1B": {"hidden_size": 2048, "num_base_layers": 16, "vocab_size": 128256},
    "Llama-3.1-8B": {"hidden_size": 4096, "num_base_layers": 32, "vocab_size": 128256},
}
_METHODS = {
    "solar": "SOLAR",
    "llama_pro": "Llama Pro",
    "lesa": "LESA",
    "opt_deus": "OpT-DeUS",
    "avg_deus": "Avg-DeUS",
}
_MEMORIES = {"hml": "MIDUS-HML", "linear": "Linear", "pkm": "PKM", "ultramem": "UltraMem"}


@dataclass(frozen=True)
class PaperRow:
    """One row of a table of the paper."""

    backbone: str
    stage: str
    method: str
    scores: dict[str, float]
    """By column of the suite, in the paper's units (per cent, or perplexity)."""
    average: float

    @property
    def title(self) -> str:
        return f"{self.method}, {self.backbone}, {self.stage}"


_GENERAL = "wikitext|arc_easy|logiqa|winogrande|commonsense_qa|boolq|piqa|mmlu"
_MATH = "gsm8k|gsm8k_cot|hendrycks_math|mathqa"
_RETRIEVAL = "triviaqa|nq_open|race"
_LONGBENCH = "|".join(category.label for category in find_suite("longbench").categories)


def _rows(backbone: str, stage: str, columns: str, table: str) -> tuple[PaperRow, ...]:
    rows = []
    for line in table.strip().split("\n"):
        method, numbers = line.strip().split(":")
        *scores, average = map(float, numbers.split())
        named = dict(zip(columns.split("|"), scores, strict=True))
        rows.append(PaperRow(backbone, stage, method, named, average))
    return tuple(rows)


PAPER = {
    "general": (
        *_rows(
            "Llama-3.2-1B",
            "CPT",
            _GENERAL,
            """
            Base: 13.22 68.69 22.27 60.22 25.88 63.61 75.08 29.85 49.37
            SOLAR: 13.41 68.81 22.58 60.22 26.29 61.16 75.24 30.14 49.21
            Llama Pro: 12.33 66.75 22.43 59.75 35.14 64.86 74.54 31.22 50.67
            LESA: 12.06 66.33 21.97 60.22 45.21 64.37 74.59 36.11 52.69
            OpT-DeUS: 11.72 66.46 23.35 61.56 46.44 62.42 74.54 36.56 53.05
            Avg-DeUS: 12.04 66.84 22.73 60.38 41.93 64.01 74.27 34.40 52.08
            MIDUS-HML: 11.64 66.16 23.20 61.56 46.27 65.29 75.08 36.91 53.50
            Linear: 11.82 65.61 22.73 62.04 42.42 64.71 75.08 35.89 52.64
            PKM: 11.97 65.70 21.35 61.40 42.18 65.47 74.65 33.93 52.10
            UltraMem: 11.64 66.46 21.81 61.09 44.31 64.83 75.63 36.49 52.94
            """,
        ),
        *_rows(
            "Llama-3.1-8B",
            "CPT",
            _GENERAL,
            """
            Base: 8.35 79.97 26.88 72.06 65.19 81.83 78.84 58.61 66.20
            SOLAR: 9.90 79.88 26.88 71.59 57.41 80.70 78.56 54.37 64.20
            Llama Pro: 7.81 81.61 29.49 73.72 70.93 81.65 79.98 62.56 68.56
            LESA: 7.73 82.07 27.96 74.11 72.40 81.93 80.30 62.63 68.77
            OpT-DeUS: 7.73 82.07 27.34 74.74 71.91 82.26 80.79 62.96 68.87
            Avg-DeUS: 7.95 82.15 27.50 73.48 71.09 82.17 80.20 62.11 68.39
            MIDUS-HML: 7.40 82.37 28.57 74.59 70.84 82.87 80.25 63.40 68.98
            """,
        ),
        *_rows(
            "Llama-3.2-1B",
            "SFT",
            _GENERAL,
            """
            Base: 13.09 69.65 21.20 58.96 26.37 62.66 75.46 30.43 49.25
            SOLAR: 13.23 69.28 23.81 58.33 27.44 60.64 75.90 31.05 49.49
            Llama Pro: 12.55 67.68 22.89 60.06 42.59 62.75 75.46 33.62 52.15
            LESA: 12.37 65.99 23.35 60.38 47.91 66.33 75.24 36.43 53.66
            OpT-DeUS: 11.82 66.62 23.81 60.14 49.55 63.43 75.52 37.64 53.81
            Avg-DeUS: 12.18 67.09 23.66 60.30 47.01 65.63 74.97 35.62 53.47
            MIDUS-HML: 11.75 66.33 21.51 60.77 50.04 66.21 75.90 37.82 54.08
            """,
        ),
        *_rows(
            "Llama-3.1-8B",
            "SFT",
            _GENERAL,
            """
            Base: 8.32 81.10 24.58 72.14 68.30 82.14 79.71 59.17 66.73
            SOLAR: 9.68 80.68 25.19 71.19 61.81 81.19 79.16 55.03 64.89
            Llama Pro: 7.81 83.33 27.19 74.11 72.07 82.26 80.79 62.32 68.87
            LESA: 7.72 83.84 26.57 75.53 73.05 83.00 80.69 63.57 69.47
            OpT-DeUS: 7.73 83.80 26.73 76.09 73.05 83.36 80.85 63.84 69.67
            Avg-DeUS: 7.91 83.88 26.42 75.45 72.89 83.18 80.47 63.10 69.34
            MIDUS-HML: 7.50 83.50 28.11 74.90 73.63 83.39 80.96 64.54 69.86
            """,
        ),
    ),
    "math": (
        *_rows(
            "Llama-3.2-1B",
            "CPT on MathPile",
            _MATH,
            """
            Base: 4.32 4.93 5.66 29.88 11.20
            Llama Pro: 5.61 4.40 5.64 30.62 11.57
            OpT-DeUS: 6.07 6.22 5.80 30.95 12.26
            MIDUS-HML: 6.60 6.60 5.62 31.39 12.55
            """,
        ),
        *_rows(
            "Llama-3.1-8B",
            "CPT on MathPile",
            _MATH,
            """
            Base: 35.33 33.36 11.42 37.99 29.53
            Llama Pro: 41.93 41.77 13.10 40.87 34.42
            OpT-DeUS: 49.36 50.04 13.84 42.58 38.96
            MIDUS-HML: 48.90 51.78 14.34 42.58 39.40
            """,
        ),
    ),
    "retrieval": _rows(
        "Llama-3.2-1B",
        "CPT",
        _RETRIEVAL,
        """
        Base: 30.38 9.72 38.28 26.13
        Llama Pro: 34.33 10.28 37.99 27.53
        OpT-DeUS: 39.02 12.11 38.18 29.77
        Avg-DeUS: 38.25 11.75 37.42 29.14
        MIDUS-HML: 39.75 12.24 37.51 29.83
        """,
    ),
    "longbench": _rows(
        "Llama-3.2-1B",
        "CPT",
        _LONGBENCH,
        """
        Base: 10.45 7.40 19.10 55.68 4.15 27.47 21.32
        Llama Pro: 10.52 7.32 21.09 58.08 3.35 35.70 23.07
        OpT-DeUS: 10.92 7.97 22.94 60.60 3.79 47.57 25.63
        Avg-DeUS: 10.66 7.74 21.04 60.38 3.54 46.96 25.03
        MIDUS-HML: 10.60 8.48 23.23 63.52 2.62 54.64 27.00
        """,
    ),
}
PAPER["wikitext"] = PAPER["general"]


def matching_rows(suite: str, configs: list[Any]) -> list[PaperRow]:
    """The paper's rows for these models, or its base and its own method where it has none.

    Rows are matched by the shape of the base and the method, after pre-training and fine-tuning.

    Args:
        suite: Which of the paper's tables.
        configs: The models' configs.
    """
    rows = PAPER.get(suite, ())
    matched: list[PaperRow] = []
    for config in configs:
        name = _method(config)
        for row in rows:
            if row.method == name and row.backbone == _backbone(config) and row not in matched:
                matched.append(row)
    return matched or [
        row
        for row in rows
        if row.backbone == "Llama-3.2-1B"
        and row.stage.startswith("CPT")
        and row.method in ("Base", "MIDUS-HML")
    ]


def _backbone(config: Any) -> str | None:
    shape = {
        "hidden_size": config.hidden_size,
        "num_base_layers": num_base_layers(config),
        "vocab_size": config.vocab_size,
    }
    return next((name for name, known in _BACKBONES.items() if known == shape), None)


def _method(config: Any) -> str | None:
    record = record_of(config)
    if not record:
        return "Base"
    if record["method"] == "midus":
        return _MEMORIES.get(record["memory"])
    return _METHODS.get(record["method"])

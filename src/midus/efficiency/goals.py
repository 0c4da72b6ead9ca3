"""What efficiency was meant to reach on an H200, and what a result says to it.

Ratios within one result, Llama-3.1-8B; limits count operations or bytes alone. The paper's ratios
come from another GPU.
"""

from dataclasses import dataclass
from typing import Any

from midus.efficiency.ratios import Row, ratio_of, value_of


@dataclass(frozen=True)
class Goal:
    """One figure of one row, over that of another where there is one."""

    text: str
    column: str
    row: tuple[str, str]
    """Method and placement."""
    over: tuple[str, str] | None
    goal: float
    at_least: bool = False
    key: str | None = None
    limit: float | None = None
    paper: float | None = None

    def reached(self, rows: list[Row]) -> float | None:
        """The figure, or None where it was not measured."""
        row = _find(rows, self.row)
        if row is None or self.over is None:
            return value_of(row, self.column, self.key)
        return ratio_of(row, _find(rows, self.over), self.column, self.key)

    def is_met(self, value: float) -> bool:
        return value >= self.goal if self.at_least else value <= self.goal


_BASE, _PRO, _OPT = ("base", ""), ("llama_pro", "llama_pro"), ("opt_deus", "top_heavy")
_HML, _TOP = ("midus", "distributed"), ("midus", "top_heavy")
_TRAIN, _COMPILED = "train_s_per_iter", "decode_compiled_tok_s"

GOALS = (
    Goal("compiled decoding, x base", _COMPILED, _HML, _BASE, 0.93, True, limit=0.95),
    Goal("compiled decoding, x Llama Pro", _COMPILED, _HML, _PRO, 1.0, True),
    Goal("eager decoding, x base", "decode_eager_tok_s", _HML, _BASE, 0.83, True, paper=0.83),
    Goal("prefill of 2,048, x base", "prefill_ms", _HML, _BASE, 1.11, key="2048", limit=1.076),
    Goal("prefill of 8,192, x base", "prefill_ms", _HML, _BASE, 1.14, key="8192", limit=1.118),
    Goal("training, x Llama Pro", _TRAIN, _HML, _PRO, 0.68, limit=0.65, paper=0.73),
    Goal("training, x OpT-DeUS", _TRAIN, _HML, _OPT, 0.78, limit=0.74, paper=0.87),
    Goal("training, both Top-heavy, x OpT-DeUS", _TRAIN, _TOP, _OPT, 0.65, limit=0.59),
    Goal("training memory, GB", "train_gb", _HML, None, 33, paper=34.8),
)


def _find(rows: list[dict[str, Any]], name: tuple[str, str]) -> Row | None:
    method, placement = name
    for row in rows:
        is_hml = row["memory"] in (None, "hml")
        if is_hml and (row["method"], row["placement"] or "") == (method, placement):
            return row
    return None

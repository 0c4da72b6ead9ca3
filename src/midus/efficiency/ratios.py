"""A figure beside the same figure of a reference row, as a ratio."""

from typing import Any

Row = dict[str, Any]


def find_row(rows: list[Row], method: str) -> Row | None:
    """The row of a method at its own placement."""
    own = {"base": None, "llama_pro": "llama_pro"}
    return next(
        (r for r in rows if r["method"] == method and r["placement"] == own.get(method)), None
    )


def value_of(row: Row | None, column: str, key: str | None = None) -> float | None:
    """A column's figure; ``key`` picks one of a column with several, such as a prompt length."""
    if row is None:
        return None
    value = row.get(column)
    if key is not None:
        value = (value or {}).get(key)
    return None if value is None else float(value)


def ratio_of(row: Row, reference: Row | None, column: str, key: str | None = None) -> float | None:
    """The row's figure over the reference's; None where either is missing."""
    value, other = value_of(row, column, key), value_of(reference, column, key)
    return None if value is None or not other else value / other


def difference_of(row: Row, reference: Row | None, column: str, key: str) -> float | None:
    """The row's figure less the reference's; None where either is missing."""
    value, other = value_of(row, column, key), value_of(reference, column, key)
    return None if value is None or other is None else value - other


_NOISE = 0.1


def noise_of(row: Row, column: str, key: str | None = None) -> float | None:
    """The spread of a figure where it is more than a tenth of it, and a ratio would say little."""
    spread = {
        "train_s_per_iter": "train_s_spread",
        "prefill_ms": "prefill_spread_ms",
    }.get(column, column.replace("_tok_s", "_spread"))
    value = value_of(row, column, key)
    width = None if spread == column else value_of(row, spread, key)
    return width if value and width and width > _NOISE * value else None


def with_ratio(value: float | None, ratio: float | None, digits: int) -> str:
    """``5.05 (0.73x)``, a figure alone, or a dash."""
    if value is None:
        return "-"
    text = f"{value:,.{digits}f}"
    return text if ratio is None else f"{text} ({ratio:.2f}x)"

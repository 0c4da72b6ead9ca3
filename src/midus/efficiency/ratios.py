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


def with_ratio(value: float | None, ratio: float | None, digits: int) -> str:
    """``5.05 (0.73x)``, a figure alone, or a dash."""
    if value is None:
        return "-"
    text = f"{value:,.{digits}f}"
    return text if ratio is None else f"{text} ({ratio:.2f}x)"

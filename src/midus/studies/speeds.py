"""Tokens a second in a study's tables: which there are, and what a reader must know of them."""

from midus.studies.figures import spread
from midus.studies.results import Row

# Beside a speed whose steps were launched kernel by kernel.
_EAGER = "†"


def speed_cell(rows: list[Row]) -> str:
    """Tokens a second over some trials, those that have them."""
    # One timing that stands for several trials is one figure: it has no spread.
    figures = {_timed(row): row["tokens_per_second"] for row in rows if _has_speed(row)}
    mark = f" {_EAGER}" if figures and any(map(_is_eager, rows)) else ""
    return spread(list(figures.values()), 0) + mark


def about_speeds(rows: list[Row]) -> list[str]:
    """Sentences below a table: of steps that were no graphs, and of those that were timed apart."""
    notes = []
    if any(map(_is_eager, rows)):
        notes.append(f"{_EAGER} Steps were no CUDA graphs: slower, with the same results.")
    # A trial of the search may be a final one, too.
    found = {row["key"]: row for row in rows if _has_speed(row)}
    apart = [row["timed_apart"] for row in found.values() if "timed_apart" in row]
    if apart:
        steps = " or ".join(f"{num:,}" for num in sorted({own["steps"] for own in apart}))
        machines = ", ".join(sorted({own["hardware"] for own in apart}))
        commits = ", ".join(sorted({str(own["conditions"]["commit"]) for own in apart}))
        notes.append(
            f"Tokens/s of {len(apart):,} of {len(found):,} trials were timed apart from them, over "
            f"{steps} steps on a free device ({machines}; commit {commits}), once for all whose "
            "steps cost the same."
        )
    return notes


def _has_speed(row: Row) -> bool:
    return bool(row.get("tokens_per_second"))


def _is_eager(row: Row) -> bool:
    return row.get("graphed") is False


def _timed(row: Row) -> tuple[str, bool]:
    """The trial whose steps were timed, and whether apart from it: it may have a speed as well."""
    apart = row.get("timed_apart")
    return (str(apart["trial"]), True) if apart else (str(row["key"]), False)

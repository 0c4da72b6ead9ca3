"""How the page writes numbers, dates and names of things that may be missing."""

import datetime
from typing import Any

MISSING = "\N{EN DASH}"
# Differences of still larger numbers leave float64.
_LARGEST = 1e100


def decimal(value: Any, digits: int = 2) -> str:
    """A number with so many digits after the point."""
    return f"{value:,.{digits}f}" if is_number(value) else MISSING


def count(value: Any) -> str:
    """A whole number with commas."""
    return f"{round(value):,}" if is_number(value) else MISSING


def significant(value: Any, digits: int = 4) -> str:
    """A number of any size: whole ones with commas, others to so many digits."""
    if isinstance(value, bool) or not is_number(value):
        return plain(value)
    if isinstance(value, int) or (value == round(value) and abs(value) < 1e15):
        return f"{round(value):,}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def share(value: Any) -> str:
    """A fraction as per cent."""
    return f"{100 * value:.1f} %" if is_number(value) else MISSING


def duration(seconds: Any) -> str:
    """Seconds as a person would say them."""
    if not is_number(seconds):
        return MISSING
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def date(text: Any) -> str:
    """An ISO date to the minute, in UTC."""
    try:
        moment = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return str(text)
    if moment.tzinfo is None:
        return moment.strftime("%Y-%m-%d %H:%M")
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def plain(value: Any) -> str:
    """Any value of a JSON file in one line."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    return significant(value) if is_number(value) else str(value)


def is_number(value: Any) -> bool:
    """Whether it can be drawn and printed as a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST

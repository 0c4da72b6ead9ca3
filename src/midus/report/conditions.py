"""Under which conditions a result was taken, as the page shows them beside it."""

from typing import Any

from midus.report.document import Conditions
from midus.report.numbers import date

_ENTRIES = ("date", "commit", "hardware", "versions", "command")


def conditions_of(what: str, values: dict[str, Any]) -> Conditions:
    """Date, commit, hardware, versions and command, as far as they were recorded.

    Args:
        what: The result they belong to.
        values: A result file's own fields, or a run's.
    """
    values = {**values, "hardware": values.get("hardware") or values.get("machine")}
    entries = []
    for name in _ENTRIES:
        value = values.get(name)
        if name == "versions" and isinstance(value, dict):
            python = {"python": values["python"]} if "python" in values else {}
            packages = {**value, **python}.items()
            value = ", ".join(f"{package} {number}" for package, number in packages if number)
        if value:
            entries.append((name, date(value) if name == "date" else str(value)))
    return Conditions(what, entries)

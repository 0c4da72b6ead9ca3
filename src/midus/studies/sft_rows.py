"""Rows of a fine-tuning of finalists: one JSON line a model, and the models they name."""

import json
from pathlib import Path

from midus.errors import MidusError
from midus.studies.results import RESULTS_NAME, Row
from midus.studies.sft_options import FOLDER


def read_rows(folder: Path, name: str) -> dict[str, Row]:
    """Every model that has been fine-tuned, by key; the folder is the study's."""
    rows: dict[str, Row] = {}
    for row in _lines(folder, name):
        rows.setdefault(row["key"], row)
    return rows


def names_model(folder: Path, name: str, model: Path) -> bool:
    """Whether any row says that its model is kept there, one of a setting no longer chosen too."""
    return any(folder / row["model"] == model for row in _lines(folder, name) if row.get("model"))


def _lines(folder: Path, name: str) -> list[Row]:
    """All rows in their order; a line that a kill cut short is left out."""
    path = folder / FOLDER / name / RESULTS_NAME
    try:
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise MidusError(f"{path} cannot be read ({error}); move it away") from error
    rows: list[Row] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or "key" not in row:
            raise MidusError(f"{path} has a line that is no result of a fine-tuning; remove it")
        rows.append(row)
    return rows

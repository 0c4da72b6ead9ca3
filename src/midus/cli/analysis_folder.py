"""Where an analysis goes: a folder named by the run that made the model."""

import json
import os
import re
from pathlib import Path

from midus.errors import MidusError

_CHECKPOINT = re.compile(r"checkpoint-\d+")


def analysis_name(model: str) -> str:
    """What to call a model: ``x`` for ``x/model``, ``x-checkpoint-9`` for ``x/checkpoint-9``."""
    path = Path(os.path.abspath(Path(model).expanduser()))
    if path.is_dir() and path.parent.name:
        if path.name == "model":
            return path.parent.name
        if _CHECKPOINT.fullmatch(path.name):
            return f"{path.parent.name}-{path.name}"
    return path.name


def analysis_folder(kind: str, model: str | None, output: Path | None) -> Path:
    """The folder to write to, which need not exist yet.

    Refuses one that cannot be made, and one that was not chosen and has another model's result.

    Args:
        kind: ``heads``, ``slots`` or ``theorem``; the result is named so.
        model: As the user gave it, if there is one.
        output: As the user chose it.
    """
    folder = output or Path("analysis", analysis_name(model) if model else kind)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise MidusError(f"{there} is a file; give a folder with --output")
    if output is None:
        _refuse_other_model(folder / f"{kind}.json", model)
    return folder


def _refuse_other_model(path: Path, model: str | None) -> None:
    from midus.models.identity import model_id

    try:
        stored = json.loads(path.read_text(encoding="utf-8"))["model_id"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if stored != (model_id(model) if model else None):
        raise MidusError(
            f"{path} is about another model ({stored}); choose another folder with --output, or "
            "remove it"
        )

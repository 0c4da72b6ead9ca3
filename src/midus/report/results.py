"""Result files (`midus.heads`, `midus.slots`, `midus.theorem`, `midus.eval`): found and matched."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.models.sources import source_id
from midus.report.runs import read_json

KINDS = ("eval", "heads", "slots", "theorem")
_KIND = re.compile(rb'"kind"\s*:\s*"midus\.\w+"')
_HEAD_BYTES = 65_536
# Checkpoints hold the trainer's JSON only, and hidden folders are half written.
_SKIPPED = re.compile(r"\..*|checkpoint-\d+|__pycache__|node_modules")


@dataclass(frozen=True)
class Result:
    """One result file."""

    path: Path
    kind: str
    """One of ``KINDS``."""
    values: dict[str, Any]

    @property
    def models(self) -> list[tuple[str | None, str | None]]:
        """(id, name) of every model the result is about; none for the theorem on its own."""
        rows = self.values.get("rows") if self.kind == "eval" else None
        listed = rows if isinstance(rows, list) else []
        pairs = [named_model(row) for row in (self.values, *listed)]
        return [pair for pair in dict.fromkeys(pairs) if pair != (None, None)]

    def is_about(self, model_id: str | None, source: str) -> bool:
        """Whether a model is among them: by its id, or by its place where an id is unknown."""
        return any(is_same_model(pair, model_id, source) for pair in self.models)


def named_model(row: Any) -> tuple[str | None, str | None]:
    """The id and the name of a model, as a result or a row of it gives them."""
    given = (row.get("model_id"), row.get("model")) if isinstance(row, dict) else (None, None)
    found_id, name = (value if isinstance(value, str) else None for value in given)
    return found_id, name


def is_same_model(named: tuple[str | None, str | None], model_id: str | None, source: str) -> bool:
    """Whether a result's model is that one: by id, or by place where one has no id."""
    found_id, name = named
    if found_id and model_id:
        return found_id == model_id
    return name is not None and source_id(name) == source_id(source)


def read_result(path: Path) -> Result:
    """Reads a result file of ours."""
    values = read_json(path)
    name = values.get("kind") if isinstance(values, dict) else None
    kind = str(name).removeprefix("midus.")
    if not isinstance(name, str) or kind not in KINDS or name == kind:
        raise MidusError(
            f"{path} is no result file: its kind is {name!r}, and a report shows "
            f"{', '.join(f'midus.{known}' for known in KINDS)}"
        )
    return Result(path, kind, values)


def find_results(place: Path) -> list[Result]:
    """The result files in a folder and below, in the order of their paths; or the file itself."""
    if place.is_file():
        return [read_result(place)]
    return [read_result(path) for path in _json_files(place) if _is_ours(path)]


def _json_files(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _SKIPPED.fullmatch(name))
        for name in sorted(files):
            if name.endswith(".json") and not name.startswith("."):
                yield Path(here, name)


def _is_ours(path: Path) -> bool:
    """Whether a file names a kind of ours, so that models' and other programs' JSON stays unread.

    A file with the name of a result is one even if nothing in it can be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise MidusError(f"{path} cannot be read ({error}); make it readable") from error
    match = _KIND.search(head)
    if match:
        return match[0].split(b'"midus.')[1].rstrip(b'"').decode() in KINDS
    return path.stem in KINDS and not head.strip()


@contextmanager
def reading(result: Result) -> Iterator[None]:
    """Turns what a file lacks, or holds in another shape than ours, into a sentence about it."""
    try:
        yield
    except MidusError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise MidusError(
            f"{result.path} is not a midus.{result.kind} file this midus can show ({reason}); "
            "make it again"
        ) from error

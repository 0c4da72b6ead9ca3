"""A study's folder: what it was begun with, and whose it is while a study runs there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from midus.errors import MidusError
from midus.reports import write_json
from midus.studies.material import Material
from midus.studies.options import StudyOptions
from midus.studies.trials import hash_facts

STUDY_NAME = "study.json"
LOCK_NAME = ".lock"


@contextmanager
def opened(out: Path, study: StudyOptions, material: Material) -> Iterator[None]:
    """The folder for this process alone, with the study it holds written down."""
    lock = FileLock(out / LOCK_NAME)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise MidusError(
            f"{out} is in use by another midus study run; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise MidusError(f"{out} cannot be used ({error.strerror}); choose another") from error
    try:
        _write_study(out, study, material)
        yield
    finally:
        lock.release()


def read_study_folder(out: Path) -> tuple[StudyOptions, str]:
    """The study that a folder holds the results of, and the identity of what it was made with."""
    try:
        values = json.loads((out / STUDY_NAME).read_text(encoding="utf-8"))
        return StudyOptions.from_dict(values["study"]), hash_facts(values["material"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MidusError(
            f"{out} holds no study ({error}); make one with: midus study run GRID.yaml --out {out}"
        ) from error


def _write_study(out: Path, study: StudyOptions, material: Material) -> None:
    if (out / STUDY_NAME).is_file():
        _, before = read_study_folder(out)
        if before != material.identity:
            raise MidusError(
                f"{out} was begun with another base, other tokens or other texts; choose another "
                "folder"
            )
    write_json(out / STUDY_NAME, {"study": study.to_dict(), "material": material.facts})

"""A study's folder: what it was begun with, and whose it is while a command works there."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from midus.errors import MidusError
from midus.reports import write_json
from midus.studies.material import Material
from midus.studies.options import StudyOptions
from midus.studies.trials import hash_facts
from midus.studies.workers import Worker, clear, others_at_work

STUDY_NAME = "study.json"
LOCK_NAME = ".lock"
# Seconds to wait for the lock where it is held but for a moment.
_PATIENCE = 2.0


@contextmanager
def opened(out: Path, material: Material) -> Iterator[Worker]:
    """Folder and device of a study for this process alone; the study stays as it is written down.

    Args:
        out: The folder.
        material: What the study was begun with.
    """
    worker = Worker(out, material.device)
    with _locked(out, timeout=0):
        if others_at_work(out):
            raise _in_use(out)
        _check_material(out, material)
        if not worker.enter(only_alone=True):
            raise MidusError(
                "another midus study command works on this device, which would change the speeds; "
                "wait for it, or take another device"
            )
        try:
            yield worker
        finally:
            worker.leave()
            clear(out)


@contextmanager
def joined(out: Path, study: StudyOptions, material: Material) -> Iterator[Worker]:
    """A place in the folder beside other processes that run trials of the study."""
    with _beside_others(out, material, lambda _: _write_study(out, study, material)) as worker:
        yield worker


@contextmanager
def visited(out: Path, material: Material, begin: Callable[[bool], None]) -> Iterator[Worker]:
    """A place in the folder beside other processes; the study stays as it is written down.

    Args:
        out: The folder.
        material: What the study was begun with.
        begin: Called while nobody comes or goes, with whether others are at work.
    """

    def checked(is_shared: bool) -> None:
        _check_material(out, material)
        begin(is_shared)

    with _beside_others(out, material, checked) as worker:
        yield worker


@contextmanager
def _beside_others(
    out: Path, material: Material, begin: Callable[[bool], None]
) -> Iterator[Worker]:
    worker = Worker(out, material.device)
    with _locked(out, timeout=_PATIENCE):
        begin(others_at_work(out))
        worker.enter()
    try:
        yield worker
    finally:
        worker.leave()
        # What has come to an end must not fail, or be another error, for files that may stay.
        with suppress(MidusError), _locked(out, timeout=_PATIENCE):
            clear(out)


@contextmanager
def _locked(out: Path, timeout: float) -> Iterator[None]:
    lock = FileLock(out / LOCK_NAME)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
    except Timeout as error:
        raise _in_use(out) from error
    except (OSError, NotImplementedError) as error:  # the latter where there are no locks
        reason = getattr(error, "strerror", None) or error
        raise MidusError(f"{out} cannot be used ({reason}); choose another") from error
    try:
        yield
    finally:
        lock.release()


def _in_use(out: Path) -> MidusError:
    return MidusError(
        f"{out} is in use by another midus study command; wait for it, or choose another folder"
    )


def read_study_folder(out: Path) -> tuple[StudyOptions, str]:
    """The study that a folder holds the results of, and the identity of what it was made with."""
    try:
        values = json.loads((out / STUDY_NAME).read_text(encoding="utf-8"))
        return StudyOptions.from_dict(values["study"]), hash_facts(values["material"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MidusError(
            f"{out} holds no study ({error}); make one with: midus study run GRID.yaml --out {out}"
        ) from error


def _check_material(out: Path, material: Material) -> None:
    _, before = read_study_folder(out)
    if before != material.identity:
        raise MidusError(
            f"{out} was begun with another base, other tokens or other texts; choose another folder"
        )


def _write_study(out: Path, study: StudyOptions, material: Material) -> None:
    if (out / STUDY_NAME).is_file():
        _check_material(out, material)
    write_json(out / STUDY_NAME, {"study": study.to_dict(), "material": material.facts})

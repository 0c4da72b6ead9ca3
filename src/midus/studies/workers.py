"""Several processes at work on one study: who is there, and whose a trial is.

Each is seen by the others while it works, and holds a lock for the trial it runs. Locks go with the
process, so what a killed one had begun is free again.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from midus.models.sources import cache_folder
from midus.studies.presence import Presence, device_name, is_anyone_in

_WORKERS, _CLAIMS = ".workers", ".claims"
# In midus' cache.
_DEVICES = "devices"
NO_ROOM = (
    "there is no memory for it beside the other processes on its device; when they have ended, the "
    "same command runs it"
)
UNSEEN = (
    "midus' cache cannot be written, so studies in other folders are not seen: tokens/s may be "
    "of a device that was shared with them"
)


class Worker:
    """This process' place in a study's folder, and on its device.

    It is seen in two places: machines and containers that share the study need not share a cache,
    and studies in other folders share nothing else.

    Args:
        out: Folder of the study.
        device: What its trials run on.
    """

    def __init__(self, out: Path, device: torch.device) -> None:
        self._out, name = out, device_name(device)
        self._in_study = Presence(out / _WORKERS, name)
        self._in_cache = Presence(cache_folder() / _DEVICES, name)
        self.sees_other_studies = True
        """False where the cache cannot be written: the study's own processes count alone."""

    def enter(self, *, only_alone: bool = False) -> bool:
        """From here on others see this process.

        Args:
            only_alone: Stay outside, unseen, where another is on the device.

        Returns:
            Whether it has come.
        """
        if not self._in_study.enter(only_alone=only_alone):
            return False
        try:
            has_come = self._in_cache.enter(only_alone=only_alone)
        except (OSError, NotImplementedError):  # the latter where there are no locks
            self._in_cache.leave()
            self.sees_other_studies = False
            return True
        if not has_come:
            self._in_study.leave()
        return has_come

    def leave(self) -> None:
        """From here on they do not."""
        for presence in self._presences():
            presence.leave()

    def is_alone(self) -> bool:
        """Whether no other process of any study works on the same device."""
        return all(presence.is_alone() for presence in self._presences())

    def solitude(self) -> int | None:
        """A number that is the same until another process comes; None while one is there.

        What shared its device with one that came and went in between is told by it, too.
        """
        # Counted first: one that comes before the look at who is there is seen by either.
        total = 0
        for presence in self._presences():
            visits = presence.visits()
            if visits is None:
                return None
            total += visits
        return total if self.is_alone() else None

    def has_been_alone(self, since: int | None) -> bool:
        """Whether no other process has been there since; `since` is the solitude of then."""
        return since is not None and self.solitude() == since

    def _presences(self) -> list[Presence]:
        return [self._in_study, *([self._in_cache] if self.sees_other_studies else [])]

    @contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """A trial for this process; False while another has it."""
        folder = self._out / _CLAIMS
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def others_at_work(out: Path) -> bool:
    """Whether any process works on the study; one that was killed does not."""
    return is_anyone_in(out / _WORKERS)


def clear(out: Path) -> None:
    """Takes the locks away where nobody is at work; the folder's own lock must be held."""
    if not others_at_work(out):
        for name in (_WORKERS, _CLAIMS):
            shutil.rmtree(out / name, ignore_errors=True)

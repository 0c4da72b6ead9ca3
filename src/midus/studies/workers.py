"""Several processes at work on one study: who is there, and whose a trial is.

Each holds a lock of its own while it works, by which others see it, and one for the trial it runs.
Locks go with the process, so what a killed one had begun is free again.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import torch
from filelock import FileLock, Timeout

from midus.studies.locks import is_held

_WORKERS, _CLAIMS = ".workers", ".claims"
# Before a device's name: one byte for each process that has come to work on it.
_VISITS = "visits-"
# Seconds for which others may hold a lock to see whether its owner does.
_PATIENCE = 2.0


class Worker:
    """This process' place in a study's folder.

    Args:
        out: Folder of the study.
        device: What its trials run on.
    """

    def __init__(self, out: Path, device: torch.device) -> None:
        self._out, self._device = out, _device_name(device)
        folder = out / _WORKERS
        # Containers may agree in the numbers of their processes and in the host's name.
        self._own = folder / f"{os.getpid()}-{uuid4().hex[:8]}@{self._device}"
        self._visits = folder / f"{_VISITS}{self._device}"
        self._lock = FileLock(self._own)

    def enter(self) -> None:
        """From here on others see this process."""
        self._own.parent.mkdir(exist_ok=True)
        self._lock.acquire(timeout=_PATIENCE)
        with self._visits.open("ab") as file:
            file.write(b".")

    def leave(self) -> None:
        """From here on they do not."""
        self._lock.release()
        self._own.unlink(missing_ok=True)

    def is_alone(self) -> bool:
        """Whether no other process works on this study on the same device."""
        return not any(
            path != self._own and path.name.split("@", 1)[-1] == self._device and is_held(path)
            for path in _files(self._out)
        )

    def solitude(self) -> int | None:
        """A number that is the same until another process comes; None while one is there.

        What shared its device with one that came and went in between is told by it, too.
        """
        if not self.is_alone() or not self._visits.is_file():
            return None
        return self._visits.stat().st_size

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
    return any(is_held(path) for path in _files(out))


def clear(out: Path) -> None:
    """Takes the locks away where nobody is at work; the folder's own lock must be held."""
    if not others_at_work(out):
        for name in (_WORKERS, _CLAIMS):
            shutil.rmtree(out / name, ignore_errors=True)


def _files(out: Path) -> list[Path]:
    folder = out / _WORKERS
    return sorted(folder.glob("*@*")) if folder.is_dir() else []


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{socket.gethostname()}-{device.type}"
    # Without the host's name: containers that share a GPU may have names of their own.
    return f"cuda-{torch.cuda.get_device_properties(device).uuid}"

"""Which processes are on a device, as far as a folder that they share can tell.

Each holds a lock of its own there, which goes with the process, and is counted as a visit, by which
one that came and went is noticed.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch
from filelock import FileLock

from midus.studies.locks import is_held

# Before a device's name: one byte for each process that has come to work on it.
_VISITS = "visits-"
# Held by a process while it comes.
_DOOR = ".door"
# Seconds for which others may hold a lock: at the door, or to see whether its owner does.
_PATIENCE = 5.0


class Presence:
    """This process on a device, for all that look into a folder.

    Args:
        folder: Made when the process comes; what killed ones left is taken away then.
        device: By its name.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        # Containers may agree in the numbers of their processes and in the host's name.
        self._own = folder / f"{os.getpid()}-{uuid4().hex[:8]}@{device}"
        self._visits = folder / f"{_VISITS}{device}"
        self._lock = FileLock(self._own)

    def enter(self, *, only_alone: bool = False) -> bool:
        """From here on others see this process.

        Args:
            only_alone: Stay outside, unseen, where another is on the device.

        Returns:
            Whether it has come.

        Raises:
            OSError: The folder cannot be written.
            NotImplementedError: It has no locks.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / _DOOR).acquire(timeout=_PATIENCE):
            self._tidy()
            if only_alone and not self.is_alone():
                return False
            self._lock.acquire(timeout=_PATIENCE)
            with self._visits.open("ab") as file:
                file.write(b".")
        return True

    def leave(self) -> None:
        """From here on they do not."""
        self._lock.release()
        with suppress(OSError):  # the next one to come takes it away
            self._own.unlink()

    def is_alone(self) -> bool:
        """Whether no other process is on the device; what cannot be looked at may be one."""
        try:
            return not any(
                path != self._own and _device_of(path) == self._device and is_held(path)
                for path in _locks(self._folder)
            )
        except OSError:
            return False

    def visits(self) -> int | None:
        """How many have come to the device since it was free; None where that is not known."""
        try:
            return self._visits.stat().st_size
        except OSError:
            return None

    def _tidy(self) -> None:
        """Takes away what nobody holds; at the door, so that nobody comes meanwhile."""
        in_use = set()
        for path in _locks(self._folder):
            if is_held(path):
                in_use.add(_device_of(path))
            else:
                path.unlink(missing_ok=True)
        for path in self._folder.glob(f"{_VISITS}*"):
            if path.name.removeprefix(_VISITS) not in in_use:
                path.unlink(missing_ok=True)


def is_anyone_in(folder: Path) -> bool:
    """Whether any process is there, on whichever device; one that was killed is not."""
    return any(is_held(path) for path in _locks(folder))


def device_name(device: torch.device) -> str:
    """The same for all processes that can share a device."""
    if device.type != "cuda":
        return f"{socket.gethostname()}-{device.type}"
    # Without the host's name: containers that share a GPU may have names of their own.
    return f"cuda-{torch.cuda.get_device_properties(device).uuid}"


def _locks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*@*")) if folder.is_dir() else []


def _device_of(lock: Path) -> str:
    return lock.name.split("@", 1)[1]

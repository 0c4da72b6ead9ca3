"""Token folders appear whole or not at all: written aside, synced, then renamed.

A model folder has its own rules (`midus.models.atomic`): a save there may keep other files, and it
lasts seconds. A build can last hours and run on several machines, and only ever makes a folder of
its own.
"""

import os
import platform
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from midus.data.rows import is_token_folder
from midus.errors import MidusError


def check_out(out: Path, overwrite: bool) -> None:
    """Refuses a target that exists, unless it may be replaced and is a token folder."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise MidusError(f"{out} exists; choose another folder or pass --overwrite")
    if not is_token_folder(out):
        raise MidusError(
            f"{out} is not a token folder, so it is not overwritten; choose another folder"
        )


@contextmanager
def working_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``, deleted on leaving, however that happens."""
    prefix = f".{out.name[:100]}.building-{platform.node()[:40]}-"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f"{prefix}*"):
            pid = left.name.removeprefix(prefix).split("-")[0]
            if pid.isdigit() and not _is_alive(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
        work = out.parent / f"{prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        work.mkdir()
    except OSError as error:
        raise MidusError(f"{out} cannot be written ({error}); choose another folder") from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def put_in_place(folder: Path, out: Path, overwrite: bool) -> None:
    """Makes a finished folder stand at ``out``."""
    for path in folder.iterdir():
        _fsync(path)
    _fsync(folder)
    check_out(out, overwrite)
    if is_token_folder(out):
        old = folder.parent / "replaced"
        os.rename(out, old)
        os.rename(folder, out)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(folder, out)
    _fsync(out.parent)


def _fsync(path: Path) -> None:
    # As in midus.models.weights, which would bring torch into every worker.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""Folders that appear whole or not at all.

A save goes to a hidden folder beside the target, is synced to disk and then renamed. Replacing an
existing folder is one atomic exchange where the system has it (Linux, macOS); elsewhere the old
folder is moved aside first and `recover` brings it back if the process dies in between.
While a folder is synced its `config.json` is held back, and it is the first file to be removed,
so that no half folder loads, hidden or not.
"""

import ctypes
import errno
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from midus.errors import MidusError
from midus.models.weights import fsync

CONFIG_NAME = "config.json"
_HELD_CONFIG = ".config.json.last"


@contextmanager
def atomic_folder(
    target: Path, overwrite: bool = False, keep_others: bool = False
) -> Iterator[Path]:
    """Yields a folder to fill; on leaving, it becomes ``target``.

    Args:
        target: Where the folder will stand.
        overwrite: Whether an existing model folder may be replaced.
        keep_others: Whether files of the old folder that the new one lacks are carried over, as
            when a trainer keeps its own state beside the model. Old weights are not.
    """
    target = Path(os.path.realpath(target))
    if os.path.ismount(target):
        raise MidusError(f"{target} is a mount point, which cannot be replaced; use a folder in it")
    if not keep_others:
        check_target(target, overwrite)
    elif target.is_file():
        raise MidusError(f"{target} is a file; give a folder")
    _sweep(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f"{_saving_prefix(target)}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    work.mkdir()
    try:
        yield work
        if keep_others and target.is_dir():
            _carry_over(target, work)
        _sync_config_last(work)
        _put_in_place(work, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise MidusError(
                f"no space left on the disk of {target.parent} while writing {target.name}; "
                "free some space and run again (nothing was changed)"
            ) from error
        raise
    finally:
        _remove(work)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuses a target that exists, unless it may be replaced and is a model folder."""
    recover(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise MidusError(f"{target} exists; choose another folder or pass --overwrite")
    if not target.is_dir() or not (target / CONFIG_NAME).is_file():
        raise MidusError(
            f"{target} is not a model folder (no {CONFIG_NAME}), so it is not overwritten; "
            "choose another folder"
        )


def check_space(target: Path, num_bytes: int) -> None:
    """Refuses to start a write that cannot fit."""
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise MidusError(
            f"{target} needs {num_bytes / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free; "
            "free some space or write a delta"
        )


def recover(target: Path) -> None:
    """Brings back a folder whose replacement was cut off between its two renames."""
    if target.exists():
        return
    for aside in sorted(target.parent.glob(f".{target.name}.old-*")):
        if (aside / CONFIG_NAME).is_file():
            os.rename(aside, target)
            return


def _sync_config_last(work: Path) -> None:
    config = work / CONFIG_NAME
    held = work / _HELD_CONFIG
    if config.is_file():
        os.rename(config, held)
    mask = os.umask(0)
    os.umask(mask)
    for path in sorted(work.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
            # safetensors makes files only their owner can read; give them the usual mode.
            path.chmod(0o666 & ~mask)
        fsync(path)
    fsync(work)
    if held.is_file():
        os.rename(held, config)
        fsync(work)


def _put_in_place(work: Path, target: Path) -> None:
    if not target.exists():
        os.rename(work, target)
    elif not _exchange(work, target):
        aside = target.parent / f".{target.name}.old-{uuid.uuid4().hex[:8]}"
        os.rename(target, aside)
        os.rename(work, target)
        fsync(target.parent)
        _remove(aside)
    fsync(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders in one step; False where the system or its file system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            done = libc.renamex_np(os.fsencode(a), os.fsencode(b), 2)  # RENAME_SWAP
        else:
            # AT_FDCWD and RENAME_EXCHANGE of renameat2(2).
            done = libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2)
    except (OSError, AttributeError, TypeError):
        return False
    return bool(done == 0)


def _carry_over(old: Path, new: Path) -> None:
    for entry in old.iterdir():
        copy = new / entry.name
        if copy.exists() or entry.suffix == ".safetensors" or entry.name.endswith(".index.json"):
            continue
        if entry.is_dir():
            shutil.copytree(entry, copy, copy_function=_link, symlinks=True)
        else:
            _link(entry, copy)


def _link(source: str | Path, copy: str | Path) -> None:
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, copy, follow_symlinks=False)


def _remove(folder: Path) -> None:
    """Deletes a folder, making it unloadable first."""
    (folder / CONFIG_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Deletes what saves of dead processes left beside the target."""
    if not target.parent.is_dir():
        return
    for left in target.parent.glob(f"{_saving_prefix(target)}*"):
        pid = left.name.removeprefix(_saving_prefix(target)).split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            _remove(left)
    for left in target.parent.glob(f".{target.name}.old-*"):
        if target.exists():
            _remove(left)


def _saving_prefix(target: Path) -> str:
    # With the host's name: on a shared disk only this host can tell which processes live.
    return f".{target.name}.saving-{platform.node()}-"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

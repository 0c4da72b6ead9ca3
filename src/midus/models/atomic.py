"""Folders that appear whole or not at all.

A save goes to a hidden folder beside the target, is synced to disk and then renamed. Replacing an
existing folder is one atomic exchange where the system has it (Linux, macOS); elsewhere the old
folder is moved aside first and `recover` brings it back if the process dies in between. While a
folder is synced its `config.json` is held back, and it is the first file to be removed, so that no
half folder loads, hidden or not.

A mount point and the current directory cannot change places with another folder. There the files
are moved in one by one between removing the old `config.json` and adding the new one.
"""

import ctypes
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from midus.errors import MidusError
from midus.models.weights import fsync

CONFIG_NAME = "config.json"
_HELD_CONFIG = ".config.json.last"
# Weights a save replaces as a whole; other files of a folder belong to other programs.
_OWNED = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|delta\.safetensors"
)


# What else a model's folder holds; with another file in it, it is somebody's own.
_OF_A_MODEL = re.compile(
    r"[^.].*\.(json|safetensors|jinja|model)|(README|LICENSE|USE_POLICY|NOTICE)[^/]*"
    r"|merges\.txt|vocab\.[^/]*|tokenizer[^/]*|chat_template[^/]*|modeling_midus\.py|\.gitattributes"
)


@contextmanager
def atomic_folder(
    target: Path,
    overwrite: bool = False,
    keep_others: bool = False,
    variant: str | None = None,
) -> Iterator[Path]:
    """Yields a folder to fill; on leaving, it becomes ``target``.

    Args:
        target: Where the folder will stand.
        overwrite: Whether an existing model folder may be replaced.
        keep_others: Replace the model in any folder and carry over the files that are not the
            model's, as when a trainer keeps its own state beside it.
        variant: Of the weights that are saved and replaced, as transformers calls it; those of
            others are files that are not the model's.
    """
    target = Path(os.path.realpath(target))
    work, owned = None, _owned(variant)
    try:
        recover(target)
        if not keep_others:
            check_target(target, overwrite)
        elif target.exists() and not target.is_dir():
            raise MidusError(f"{target} is a file; give a folder")
        _sweep(target)
        work = _saving_parent(target) / f"{_saving_prefix(target)}{os.getpid()}-{_random()}"
        work.mkdir(parents=True)
        yield work
        _sync_config_last(work)
        if _must_stay(target):
            _move_into(work, target, owned if keep_others else None)
        else:
            if keep_others and target.is_dir():
                _carry_over(target, work, owned)
            _put_in_place(work, target, overwrite or keep_others)
            if keep_others and work.is_dir():  # the old folder, which changed places with it
                _carry_over(work, target, owned)  # what another process has put there meanwhile
    except (OSError, SafetensorError) as error:
        if "No space left" in str(error):
            raise MidusError(
                f"no space left on the disk of {target} while writing; free some space and run "
                "again (what was there before is unchanged)"
            ) from error
        raise MidusError(f"{target} cannot be written ({error}); choose another folder") from error
    finally:
        if work is not None:
            _remove(work)


def check_target(target: Path, overwrite: bool) -> None:
    """Refuses a target that exists, unless it may be replaced and is a model folder."""
    try:
        recover(target)
        is_free = _is_free(target)
    except OSError as error:
        raise MidusError(f"{target} cannot be written ({error}); choose another folder") from error
    if is_free:
        return
    if not overwrite:
        raise MidusError(f"{target} exists; choose another folder or pass --overwrite")
    if not target.is_dir() or not (target / CONFIG_NAME).is_file():
        raise MidusError(
            f"{target} is not a model folder (no {CONFIG_NAME}), so it is not overwritten; "
            "choose another folder"
        )
    _refuse_somebodys_own(target)


def _refuse_somebodys_own(target: Path) -> None:
    try:
        is_a_models = "model_type" in json.loads((target / CONFIG_NAME).read_text())
    except (OSError, ValueError, TypeError):
        is_a_models = True  # a damaged one, which is to be replaced
    foreign = [
        entry.name
        for entry in sorted(target.iterdir())
        if not _OF_A_MODEL.fullmatch(entry.name) or (entry.is_dir() and not entry.is_symlink())
    ]
    if foreign or not is_a_models:
        what = foreign[0] if foreign else f"a {CONFIG_NAME} without model_type"
        raise MidusError(
            f"{target} holds {what}, which is no part of a model, and would be lost; move it away "
            "or choose another folder"
        )


def check_space(target: Path, num_bytes: int) -> None:
    """Refuses to start a write that cannot fit."""
    parent = Path(os.path.realpath(target))
    while not parent.is_dir():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise MidusError(
            f"{target} needs {num_bytes / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB "
            "free; free some space or write a smaller checkpoint"
        )


def refuse_overlap(target: Path, *sources: Path) -> None:
    """Refuses a target whose replacement would delete what is being read."""
    place = Path(os.path.realpath(target))
    for source in sources:
        folder = Path(os.path.realpath(source))
        if place == folder or place in folder.parents:
            raise MidusError(
                f"{target} is or holds {source}, which is being read; choose another folder"
            )


def recover(target: Path) -> None:
    """Brings back a folder whose replacement was cut off between its two renames."""
    if target.exists():
        return
    for aside in sorted(_beside(target, f".{_short_name(target)}.old-")):
        if (aside / CONFIG_NAME).is_file():
            os.rename(aside, target)
            return


def _is_free(target: Path) -> bool:
    return not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))


def _must_stay(target: Path) -> bool:
    """Whether a folder cannot change places: a mount point, or where this process stands."""
    if not target.is_dir():
        return False
    here = Path.cwd()
    return os.path.ismount(target) or target == here or target in here.parents


def _sync_config_last(work: Path) -> None:
    config, held = work / CONFIG_NAME, work / _HELD_CONFIG
    if config.is_file():
        os.rename(config, held)
    mask = os.umask(0)
    os.umask(mask)
    for path in sorted(work.rglob("*")):
        if path.is_file() and not path.is_symlink():
            # safetensors makes files only their owner can read; give them the usual mode.
            path.chmod(0o666 & ~mask)
            fsync(path)
    fsync(work)
    if held.is_file():
        os.rename(held, config)
        fsync(work)


def _put_in_place(work: Path, target: Path, overwrite: bool) -> None:
    if _is_free(target):
        os.rename(work, target)
    elif not overwrite:
        raise MidusError(f"{target} appeared while it was being made; nothing was overwritten")
    elif not _exchange(work, target):
        aside = target.parent / f".{_short_name(target)}.old-{_random()}"
        os.rename(target, aside)
        os.rename(work, target)
        fsync(target.parent)
        _remove(aside)
    fsync(target.parent)


def _owned(variant: str | None) -> re.Pattern[str]:
    if variant is None:
        return _OWNED
    name = re.escape(variant)
    return re.compile(
        rf"model\.{name}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index\.{name}\.json"
    )


def _move_into(work: Path, target: Path, owned: re.Pattern[str] | None) -> None:
    """Moves files into a folder that stays; without ``owned`` all that was there goes."""
    (target / CONFIG_NAME).unlink(missing_ok=True)
    for old in target.iterdir():
        if old != work and (owned is None or owned.fullmatch(old.name)):
            _delete(old)
    for new in sorted(work.iterdir(), key=lambda path: path.name == CONFIG_NAME):
        os.replace(new, target / new.name)
    fsync(target)


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


def _carry_over(old: Path, new: Path, owned: re.Pattern[str]) -> None:
    for entry in old.iterdir():
        copy = new / entry.name
        if os.path.lexists(copy) or owned.fullmatch(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
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
    with suppress(OSError):
        (folder / CONFIG_NAME).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sweep(target: Path) -> None:
    """Deletes what saves of dead processes left behind."""
    prefix = _saving_prefix(target)
    for left in _saving_parent(target).glob(f"{glob.escape(prefix)}*"):
        pid = left.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            _remove(left)
    if target.exists():
        for left in _beside(target, f".{_short_name(target)}.old-"):
            _remove(left)


def _beside(target: Path, prefix: str) -> list[Path]:
    return list(target.parent.glob(f"{glob.escape(prefix)}*"))


def _saving_parent(target: Path) -> Path:
    # A mount point's parent is another file system, from which nothing can be renamed.
    return target if os.path.ismount(target) else target.parent


def _saving_prefix(target: Path) -> str:
    # With the host's name: on a shared disk only this host can tell which processes live.
    return f".{_short_name(target)}.saving-{platform.node()[:40]}-"


def _short_name(target: Path) -> str:
    """The target's name, cut so that what is added to it still makes a valid file name."""
    name = target.name
    if len(name.encode()) <= 120:
        return name
    return (
        name.encode()[:100].decode(errors="ignore") + hashlib.sha256(name.encode()).hexdigest()[:12]
    )


def _random() -> str:
    return uuid.uuid4().hex[:8]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""Whether a lock is held, by whichever process."""

from pathlib import Path

from filelock import FileLock, Timeout


def is_held(path: Path) -> bool:
    """Whether a lock file is somebody's; one that was killed holds nothing."""
    if not path.is_file():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False

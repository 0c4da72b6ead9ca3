"""Signals that end a study as its time limit would: at the next step, with all that was reached.

A process that is killed loses the trial it is in and, where several share a GPU through NVIDIA's
MPS, may take the others down with it.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from midus.studies.timing import Deadline

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which a signal is the first one again: a process may get it from its group, and from
# who passes it on.
_TWICE = 1.0
_SAID = b"\nstopping at the next step; a second signal stops at once and loses this trial\n"


@contextmanager
def ended_by_signals(deadline: Deadline) -> Iterator[None]:
    """Ctrl-C or SIGTERM ends the deadline; the second one does what it always did.

    Signals that this process was told to ignore, as jobs in the background are, stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread set handlers
        return
    # None is a handler that was not set by Python, and cannot be set again by it.
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {n: old for n, old in found.items() if old not in (None, signal.SIG_IGN)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    first: float | None = None

    def end(number: int, _frame: Any) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            deadline.end()
            # print may be in the middle of a line, which it cannot enter twice; and who reads it
            # may be gone, by the same signal.
            with suppress(OSError):
                os.write(2, _SAID)
        elif time.monotonic() - first >= _TWICE:
            restore()
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        restore()

"""Seconds and peak memory of a command in a process of its own."""

import os
import sys
import tempfile
import time


def run_measured(command: list[str]) -> tuple[float, float]:
    """Seconds and peak resident bytes of a command; its output is dropped."""
    return run_captured(command)[:2]


def run_captured(command: list[str]) -> tuple[float, float, str]:
    """Seconds, peak resident bytes and standard output of a command."""
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.execv(command[0], command)
        _, status, usage = os.wait4(child, 0)
        if status:
            sys.exit(f"{' '.join(command)} failed")
        output.seek(0)
        scale = 1 if sys.platform == "darwin" else 1024
        return time.perf_counter() - started, usage.ru_maxrss * scale, output.read()

"""A measurement with the conditions it was taken under: one JSON line, one line of text."""

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("midus", "torch", "transformers", "safetensors")


def conditions() -> dict[str, Any]:
    """Where and with what this process runs."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": f"{_cpu_name()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def write_report(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as JSON lines, each with its conditions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = conditions()
    text = "".join(json.dumps({**row, "conditions": shared}) + "\n" for row in rows)
    path.write_text(text)


def _commit() -> str | None:
    folder = Path(__file__).parent
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

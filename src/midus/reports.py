"""A measurement with the conditions it was taken under, as JSON."""

import datetime
import json
import math
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("midus", "torch", "triton", "transformers", "safetensors", "lm_eval")


def conditions() -> dict[str, Any]:
    """Where and with what this process runs."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join([_program(), *sys.argv[1:]]),
        "machine": machine_name(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _program() -> str:
    """What was called: a script, or a module."""
    called = Path(sys.argv[0]).name
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if called != "__main__.py" or spec is None:
        return called
    return f"python -m {spec.name.removesuffix('.__main__')}"


def write_report(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as JSON lines, each with its conditions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = conditions()
    text = "".join(json.dumps({**row, "conditions": shared}) + "\n" for row in rows)
    path.write_text(text)


def write_result(
    path: Path, rows: list[dict[str, Any]], hardware: str, protocol: dict[str, Any] | None = None
) -> None:
    """Writes one JSON object, aside and then renamed: the conditions once, then the rows.

    Args:
        path: File to write.
        rows: The measurements.
        hardware: Where they were taken.
        protocol: How, where a command has more than one way.
    """
    shared = conditions()
    result = {
        "hardware": hardware,
        "versions": {**shared["versions"], "python": shared["python"]},
        **{name: shared[name] for name in ("commit", "date", "command")},
        **({} if protocol is None else {"protocol": protocol}),
        "rows": rows,
    }
    write_json(path, result)


def write_analysis(
    path: Path,
    kind: str,
    model: str | None,
    model_id: str | None,
    hardware: str,
    figures: list[str],
    values: dict[str, Any],
) -> None:
    """Writes one JSON object about a model, aside and then renamed.

    Args:
        path: File to write.
        kind: What it is, such as ``midus.heads``; readers go by it.
        model: The model as the user gave it, or None where there is none.
        model_id: What it is, byte for byte.
        hardware: Where it ran.
        figures: Names of the pictures beside the file.
        values: Everything else.
    """
    shared = conditions()
    result = {
        "kind": kind,
        "model": model,
        "model_id": model_id,
        "hardware": hardware,
        "versions": {**shared["versions"], "python": shared["python"]},
        **{name: shared[name] for name in ("commit", "date", "command")},
        "figures": figures,
        **values,
    }
    write_json(path, result)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON aside and renames it; a number JSON cannot hold (infinity, NaN) is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")
    aside.replace(path)


def finite(value: Any) -> Any:
    """The same with None for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _commit() -> str | None:
    # A tree that was copied to a machine without its history is told its commit.
    if "MIDUS_COMMIT" in os.environ:
        return os.environ["MIDUS_COMMIT"]
    folder = Path(__file__).parent
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine_name() -> str:
    """The processor and how many of it."""
    return f"{_cpu_name()}, {os.cpu_count()} CPUs"


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

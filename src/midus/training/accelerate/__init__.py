"""Settings of `accelerate launch`, by name: `ddp` and `fsdp2`."""

from pathlib import Path

from midus.errors import MidusError


def settings_file(name: str) -> Path:
    """Where the packaged settings of that name are."""
    folder = Path(__file__).parent
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise MidusError(f"settings {name!r} are unknown; choose one of {', '.join(known)}")
    return folder / f"{name}.yaml"

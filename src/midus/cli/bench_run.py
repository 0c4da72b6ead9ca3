"""What the commands of `midus bench` that measure models share: target, processes, result files."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from midus.errors import MidusError


class BenchRun:
    """One command.

    Args:
        name: How its result file begins.
        shape: Built-in shape, or empty.
        model: Checkpoint or hub id, or empty.
        device: ``cuda``, ``cpu`` or empty.
    """

    def __init__(self, name: str, shape: str, model: str, device: str) -> None:
        from midus.efficiency.processes import start_server

        if shape and model:
            raise MidusError(
                f"shape={shape!r} and model={model!r} exclude each other; give one of them"
            )
        start_server()  # it imports while this process does
        from midus.cli import console
        from midus.efficiency.hardware import pick_device_type
        from midus.models.shapes import SHAPES, shape_config
        from midus.upscaling.inspect import target_config

        console.quieten_libraries()
        self.name = name
        self.device = pick_device_type(device)
        if shape and shape not in SHAPES:
            raise MidusError(f"shape {shape!r} is unknown; choose one of {', '.join(SHAPES)}")
        self.target = shape or model or ("llama-3.1-8b" if self.device == "cuda" else "tiny")
        self.is_shape = not model
        self.base_config = (
            shape_config(self.target) if self.is_shape else target_config(self.target)
        )
        self.rows: list[dict[str, Any]] = []

    def measure(
        self,
        methods: str,
        points: Callable[[Any], tuple[Any, ...]],
        protocol: Any,
        json_path: Path | None,
    ) -> None:
        """Runs a process for each method and keeps the result file up to date.

        Args:
            methods: As the user named them; what the base cannot have is refused before any runs.
            points: The rows of one method.
            protocol: How they are measured.
            json_path: Result file; default: by name and target.
        """
        from midus.cli import console
        from midus.efficiency.rows import Job
        from midus.efficiency.runs import run_jobs
        from midus.efficiency.subjects import parse_subjects
        from midus.efficiency.training_step import SETTINGS
        from midus.reports import write_result

        jobs = [
            Job(target=self.target, is_shape=self.is_shape, points=points(subject))
            for subject in parse_subjects(methods)
        ]
        for job in jobs:
            for subject in dict.fromkeys(point.subject for point in job.points):
                subject.grown_config(self.base_config)
        path = json_path or Path("bench") / f"{self.name}-{self._short_name()}.json"
        _refuse_unwritable(path)
        shared = {"base": self.target, **protocol.to_dict(), **SETTINGS}
        with console.err.status("starting") as status:
            self.rows, hardware = run_jobs(
                jobs,
                lambda rows, hardware: write_result(path, rows, hardware, shared),
                lambda phase: _show(status, phase),
            )
        self._path = path
        self._title = f"{self.target} on {hardware}"

    def finish(self, plot: Callable[[list[dict[str, Any]], Path, str], None]) -> None:
        """Says what went wrong, draws the rows, and says where the result is.

        Args:
            plot: Draws rows into a file, under a title.
        """
        from midus.cli import console

        for row in self.rows:
            where = [f"{n} {row[n]}" for n in ("value", "batch", "context") if n in row]
            name = " ".join([row["label"], *where])
            for phase in row["oom"]:
                console.out.print(f"{name}: out of memory in {phase}", style="yellow")
            for phase, error in row["errors"].items():
                console.out.print(f"{name}: {phase} failed: {error}", style="yellow")
        picture = self._path.with_suffix(".png")
        try:
            plot(self.rows, picture, self._title)
            console.out.print(f"wrote {self._path} and {picture}", style="dim")
        except (ImportError, OSError) as error:
            console.out.print(f"wrote {self._path}", style="dim")
            missing = "matplotlib is missing; pip install matplotlib"
            reason = missing if isinstance(error, ImportError) else str(error)
            console.err.print(f"no picture: {reason}")
        if any("process" in row["errors"] for row in self.rows):
            raise typer.Exit(1)

    def _short_name(self) -> str:
        """How result files call the base: a folder by its name, a hub id with its owner."""
        folder = Path(self.target)
        if self.is_shape or not folder.exists():
            return self.target.replace("/", "--")
        return folder.resolve().name


def _refuse_unwritable(path: Path) -> None:
    """Finds out before anything is measured that the result could not be kept."""
    if path.suffix != ".json":
        raise MidusError(f"json={path} must end in .json; the picture goes beside it as .png")
    if path.is_dir():
        raise MidusError(f"json={path} is a folder; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise MidusError(
            f"json={path} cannot be written ({error.strerror}); choose another place"
        ) from error


def _show(status: Any, phase: str) -> None:
    from midus.cli import console

    if console.err.is_terminal:
        status.update(phase)
    else:
        console.err.print(phase)

"""Who carries out a build: processes of this machine, a Ray cluster or Slurm jobs.

On a cluster all machines must see the inputs and the folder that is made: tasks leave what they
have done beside it.
"""

import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus.data.plan import BuildPlan
from midus.errors import MidusError

EXECUTORS = ("local", "ray", "slurm")
Track = Callable[[Iterable[Any], str], Iterable[Any]]
_TITLES = {"survey": "choosing documents", "tokenize": "tokenising", "merge": "writing"}


def no_bar(items: Iterable[Any], _: str) -> Iterable[Any]:
    """Progress for nobody to see."""
    return items


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What Slurm must be told of every job."""

    partition: str | None = None
    """Slurm partition of the jobs."""
    time: str = "12:00:00"
    """Time limit of one task."""


def check_executor(executor: str, slurm: SlurmOptions) -> None:
    """Refuses an executor that is unknown or cannot run here."""
    if executor not in EXECUTORS:
        raise MidusError(f"executor={executor!r} is unknown; choose one of {', '.join(EXECUTORS)}")
    if executor == "slurm" and not slurm.partition:
        raise MidusError("executor='slurm' needs a partition; add --slurm-partition")
    if executor == "slurm" and shutil.which("sbatch") is None:
        raise MidusError("executor='slurm' needs sbatch; run on a machine that can submit jobs")
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        raise MidusError("executor='ray' needs the package ray; run: pip install ray")


def make_executors(plan: BuildPlan, executor: str, slurm: SlurmOptions) -> dict[str, Any]:
    """One datatrove executor a pipeline, each waiting for the one before it."""
    from datatrove.executor import (
        LocalPipelineExecutor,
        RayPipelineExecutor,
        SlurmPipelineExecutor,
    )

    from midus.data.steps import pipelines

    made: dict[str, Any] = {}
    previous = None
    for stage, (steps, tasks) in pipelines(plan).items():
        workers = min(plan.workers, tasks)
        common = {"tasks": tasks, "workers": workers, "logging_dir": str(_logs(plan, stage))}
        if executor == "local":
            previous = LocalPipelineExecutor(steps, **common)
        elif executor == "ray":
            previous = RayPipelineExecutor(steps, **common)
        else:
            previous = SlurmPipelineExecutor(
                steps,
                **common,
                depends=previous,
                partition=slurm.partition,
                time=slurm.time,
                job_name=f"midus-{stage}",
                # The merge holds the index of all documents, 26 bytes each.
                mem_per_cpu_gb=8,
                mail_type="NONE",
            )
        made[stage] = previous
    return made


def run_executors(plan: BuildPlan, executors: dict[str, Any], track: Track) -> None:
    """Runs local or Ray executors one after another, with a bar of tasks for each."""
    for stage, executor in executors.items():
        with _watched(track, _logs(plan, stage) / "completions", executor.tasks, _TITLES[stage]):
            executor.run()


def submit(executors: dict[str, Any]) -> None:
    """Submits Slurm jobs: the last one makes datatrove submit those it waits for."""
    list(executors.values())[-1].run()


def _logs(plan: BuildPlan, stage: str) -> Path:
    return plan.work_folder / "logs" / stage


@contextmanager
def _watched(track: Track, completions: Path, tasks: int, title: str) -> Iterator[None]:
    """A bar that moves as tasks end, which datatrove marks by one file each."""
    done = threading.Event()

    def watch() -> None:
        for task in track(range(tasks), title):
            while not done.is_set() and _count(completions) <= task:
                done.wait(0.2)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0

"""Whole results: every job in a process of its own, rows kept as they come."""

from collections.abc import Callable, Iterable
from typing import Any

from midus.efficiency.processes import run_in_process
from midus.efficiency.rows import Job, empty_row, run_job

Rows = list[dict[str, Any]]


def run_jobs(
    jobs: Iterable[Job],
    on_change: Callable[[Rows, str], None],
    on_phase: Callable[[str], None] = lambda phase: None,
) -> tuple[Rows, str]:
    """Measures jobs one after another.

    A process that dies leaves what it had measured and a sentence in ``errors``; the next one
    starts all the same.

    Args:
        jobs: What to measure.
        on_change: Called with all rows and the hardware whenever there is more of them.
        on_phase: Called with what is being measured.

    Returns:
        The rows and the hardware's name.
    """
    done: Rows = []
    rows: Rows = []
    hardware = ""

    def receive(kind: str, content: Any) -> None:
        nonlocal hardware, rows
        if kind == "phase":
            on_phase(content)
        elif kind == "hardware":
            hardware = content
        else:
            rows = content
            on_change([*done, *rows], hardware)

    for job in jobs:
        rows = []
        failure = run_in_process(run_job, job, receive)
        if failure:
            rows = _with_failure(job, rows, failure)
        done.extend(rows)
        on_change(done, hardware)
    return done, hardware


def _with_failure(job: Job, rows: Rows, failure: str) -> Rows:
    """The rows a dead process sent, the one it died in, and those it did not come to."""
    rows = rows or [empty_row(job.points[0])]
    rows[-1]["errors"]["process"] = failure
    left = [empty_row(point) for point in job.points[len(rows) :]]
    for row in left:
        row["errors"]["process"] = "the process ended before this row"
    return [*rows, *left]

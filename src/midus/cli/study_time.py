"""`midus study time`: tokens a second of trials that have none, timed alone."""

from pathlib import Path
from typing import Annotated

import typer

from midus.cli.options import parse_names
from midus.errors import MidusError


def time_steps(
    folders: Annotated[list[Path], typer.Argument(help="Folders of studies.")],
    steps: Annotated[int, typer.Option(help="Steps to time, after three that warm up.")] = 10,
    only: Annotated[
        str | None, typer.Option(help="Methods to time, with commas; default: all.")
    ] = None,
) -> None:
    """Time training steps for trials that ended without tokens/s, on a device that is free.

    Trials that shared their device have none. Those whose steps cost the same are timed once, be
    they of one study or of several that are given together.
    """
    chosen = parse_names("only", only)
    from midus.cli import console
    from midus.studies.results import RESULTS_NAME
    from midus.studies.timed_apart import time_studies

    if chosen and len(folders) > 1:
        raise MidusError(
            f"only={only!r} names methods of one study, and there are {len(folders)}; give one "
            "folder, or leave it out"
        )
    console.quieten_libraries()
    timed = time_studies(
        folders,
        steps=steps,
        only=chosen,
        say=lambda sentence: console.err.print(sentence, soft_wrap=True),
        track=console.track,
    )
    if not timed.trials and not timed.skipped:
        console.out.print("timed      nothing: no trial that is done is left to time")
        return
    console.out.print(f"timed      {timed.timings:,} times, for {timed.trials:,} trials")
    for folder in folders:
        console.out.print(f"results    {folder / RESULTS_NAME}")
    if timed.skipped:
        raise MidusError(
            f"{timed.trials} trials have their tokens/s and {len(timed.skipped)} timings could not "
            f"be taken; the first of them is {timed.skipped[0]}"
        )

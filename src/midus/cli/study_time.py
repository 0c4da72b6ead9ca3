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
    from midus.studies.results import RESULTS_NAME, Row
    from midus.studies.timed_apart import time_trials

    if chosen and len(folders) > 1:
        raise MidusError(
            f"only={only!r} names methods of one study, and there are {len(folders)}; give one "
            "folder, or leave it out"
        )
    console.quieten_libraries()
    speeds: dict[str, Row] = {}
    timed = [
        time_trials(
            folder,
            steps=steps,
            only=chosen,
            say=lambda sentence: console.err.print(sentence, soft_wrap=True),
            track=console.track,
            speeds=speeds,
        )
        for folder in folders
    ]
    trials = sum(each.trials for each in timed)
    skipped = [why for each in timed for why in each.skipped]
    if not trials and not skipped:
        console.out.print("timed      nothing: no trial that is done is left to time")
        return
    timings = sum(each.timings for each in timed)
    console.out.print(f"timed      {timings:,} times, for {trials:,} trials")
    for folder in folders:
        console.out.print(f"results    {folder / RESULTS_NAME}")
    if skipped:
        raise MidusError(
            f"{trials} trials have their tokens/s and {len(skipped)} timings could not "
            f"be taken; the first of them is {skipped[0]}"
        )

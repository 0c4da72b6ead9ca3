"""`midus study sft`: the base and the final models of a study, fine-tuned alike and compared."""

from pathlib import Path
from typing import Annotated

import typer

from midus.cli.options import parse_names
from midus.errors import MidusError


def sft(
    folder: Annotated[Path, typer.Argument(help="Folder of a study that has kept final models.")],
    config: Annotated[
        Path,
        typer.Argument(help="YAML file of midus train, stage sft; its model is replaced."),
    ],
    name: Annotated[
        str | None, typer.Option(help="Folder of the results below sft; default: the file's name.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Stop at the next step after so many seconds.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Methods, with commas; untouched is the base; default: all.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of the study, with commas, as in 0,1000; default: all."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option, as in optimizer.lr=1e-5.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the fine-tuned models; default: figures only.")
    ] = False,
) -> None:
    """Fine-tune the base and every kept final model with the same options, one after the other.

    Stopped (Ctrl-C, SIGTERM) or killed, the same command goes on; a model that has a row is not run
    again. Given several times at once, each process fine-tunes models that no other has.
    """
    methods = parse_names("only", only)
    chosen = [_seed(part) for part in parse_names("seeds", seeds)]
    from midus.cli import console
    from midus.studies.sft import run_sft
    from midus.studies.sft_report import write_sft_report
    from midus.studies.stopping import ended_by_signals
    from midus.studies.timing import Deadline

    console.quieten_libraries()
    deadline = Deadline(time_limit)
    with console.without_foreign_bars(), ended_by_signals(deadline):
        progress = run_sft(
            folder,
            config,
            name=name,
            settings=settings or [],
            only=methods,
            seeds=chosen,
            keep=keep,
            say=lambda sentence: console.err.print(sentence, soft_wrap=True),
            track=console.track,
            deadline=deadline,
        )
    path, text = write_sft_report(folder, progress.name)
    console.out.print(text)
    console.out.print(f"ran        {progress.ran:,} models")
    if progress.is_out_of_time:
        console.out.print(
            f"stopped    {deadline.reason}, {progress.left:,} are left; the same command goes on"
        )
    console.out.print(f"written    {path}")
    if progress.skipped:
        raise MidusError(
            f"{progress.ran} models were fine-tuned and {len(progress.skipped)} could not be; the "
            f"first of them is {progress.skipped[0]}"
        )


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise MidusError(f"seeds={text!r} must be a whole number from 0, as in 0,1000")
    return int(text)

"""`midus study`: methods compared fairly, from a grid to a table."""

from pathlib import Path
from typing import Annotated, Any

import typer

from midus.cli.options import parse_names
from midus.cli.study_scaling import scaling
from midus.cli.study_sft import sft
from midus.cli.study_time import time_steps

study = typer.Typer(
    help="Compare methods by many short trainings that differ in nothing else.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@study.callback()
def _group() -> None:
    pass


@study.command()
def run(
    grid: Annotated[Path, typer.Argument(help="YAML file of the study; see studies/.")],
    out: Annotated[Path, typer.Option(help="Folder of its results; a study goes on there.")],
    time_limit: Annotated[
        float | None, typer.Option(help="Stop at the next step after so many seconds.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Methods to run, with commas; default: all.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change an option, as in run.data.max_tokens=1000000."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials; read no weights or data.")
    ] = False,
) -> None:
    """Run every trial of a grid that has not run yet, one after the other in this process.

    Stopped (Ctrl-C, SIGTERM) or killed, the same command goes on; a trial that has ended is never
    run again. Given several times at once, each process runs trials that no other has.
    """
    chosen = parse_names("only", only)
    from midus.cli import console
    from midus.studies.options import read_study

    console.quieten_libraries()
    options = read_study(grid, settings or [])
    if dry_run:
        _print_trials(options)
        return
    from midus.studies.run import run_study
    from midus.studies.stopping import ended_by_signals
    from midus.studies.timing import Deadline

    deadline = Deadline(time_limit)
    with ended_by_signals(deadline):
        progress = run_study(
            options,
            out,
            only=chosen,
            say=lambda sentence: console.err.print(sentence, soft_wrap=True),
            track=console.track,
            deadline=deadline,
        )
    console.out.print(f"ran        {progress.ran:,} trials")
    if progress.is_out_of_time:
        console.out.print(
            f"stopped    {deadline.reason}, {progress.left:,} or more are left; the same command "
            "goes on"
        )
    console.out.print(f"results    {out / 'results.jsonl'}")


@study.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a study.")],
) -> None:
    """Write report.md and its pictures: chosen on validation, reported on test."""
    import importlib.util

    from midus.cli import console
    from midus.studies.forgetting_plot import plot_forgetting
    from midus.studies.plots import plot_study
    from midus.studies.report import REPORT_NAME, make_report, to_markdown
    from midus.studies.settings_plot import plot_settings
    from midus.training.checkpoint import replace_text

    made = make_report(folder)
    has_plots = importlib.util.find_spec("matplotlib") is not None
    drawings = (plot_study, plot_forgetting, plot_settings) if has_plots else ()
    figures = [name for draw in drawings for name in draw(made, folder)]
    text = to_markdown(made, figures)
    replace_text(folder / REPORT_NAME, text)
    console.out.print(text.split("\n## ")[0].rstrip())
    console.out.print(f"\nwritten    {folder / REPORT_NAME}")
    if not has_plots:
        console.out.print("pictures   none, because matplotlib is not installed")


study.command()(scaling)
study.command()(sft)
study.command("time")(time_steps)


def _print_trials(options: Any) -> None:
    from midus.cli import console
    from midus.studies.grid import count_finals, lengths, search_trials

    trials = search_trials(options)
    rows = [
        [t.method, t.setting or "-", str(t.seed), f"{t.options.trainer['max_steps']:,}"]
        for t in trials
    ]
    console.print_table(options.name, ["method", "setting", "seed", "steps"], rows)
    finals = " to ".join(f"{num:,}" for num in dict.fromkeys(count_finals(options)))
    tokens = [f" of {num:,} tokens" for num in lengths(options) or ()] or ["", ""]
    console.out.print(
        f"trials     {len(trials):,}{tokens[0]}, then {finals}{tokens[1]} with the final seeds"
    )

"""`midus`: the list of commands, and how errors reach the user."""

import sys
from typing import Annotated

import typer

from midus import __version__
from midus.cli.analyze import analyze
from midus.cli.bench import bench
from midus.cli.data import data
from midus.cli.eval import evaluation
from midus.cli.export import export
from midus.cli.generate import generate
from midus.cli.inspect import inspect
from midus.cli.merge import merge
from midus.cli.methods import methods
from midus.cli.plan import plan
from midus.cli.report import report
from midus.cli.serve import serve
from midus.cli.study import study
from midus.cli.train import train
from midus.cli.upscale import upscale
from midus.cli.verify import verify
from midus.errors import MidusError

app = typer.Typer(
    name="midus",
    help="Grow a pre-trained language model by memory blocks between its layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (
    upscale,
    train,
    inspect,
    methods,
    plan,
    verify,
    merge,
    export,
    generate,
    serve,
    report,
):
    app.command()(_command)
app.add_typer(analyze, name="analyze")
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
app.add_typer(evaluation, name="eval")
app.add_typer(study, name="study")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"midus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: one sentence and exit code 2 for what the user can mend."""
    try:
        app()
    except MidusError as error:
        sys.stdout.flush()
        print(f"midus: {error}", file=sys.stderr)
        sys.exit(2)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        said = str(error).strip() or "out of memory"
        print(f"midus: {said.splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

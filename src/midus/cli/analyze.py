"""`midus analyze`: why a grown model behaves as it does, in pictures and numbers."""

import typer

from midus.cli.analyze_heads import heads
from midus.cli.analyze_slots import slots
from midus.cli.analyze_theorem import theorem

analyze = typer.Typer(
    help="Head importance, what the memories hold, and the structural theorem.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _command in (heads, slots, theorem):
    analyze.command()(_command)

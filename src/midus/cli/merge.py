"""`midus merge`: a delta and its base become one full checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from midus.cli import options


def merge(
    delta: Annotated[str, typer.Argument(help="Folder or hub id of the delta.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    base: Annotated[
        str | None, typer.Option(help="Where the base is, if not where the delta says.")
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Write the full checkpoint that a delta and its base make up."""
    from midus.cli import console
    from midus.upscaling import merge_delta

    console.quieten_libraries()
    folder = merge_delta(delta, out, base=base, overwrite=overwrite, track=console.track)
    console.out.print(f"written    {folder}")

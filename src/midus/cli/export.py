"""`midus export`: a model without memory blocks as a GGUF file for llama.cpp."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    model: Annotated[str, typer.Argument(help="A model of a copied-block method, or a base.")],
    out: Annotated[Path, typer.Argument(help="File to write, ending in .gguf.")],
    dtype: Annotated[
        str | None,
        typer.Option("--type", help="f32, f16, bf16 or q8_0; default: the checkpoint's own."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Where a delta's base is, if not where it says.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it exists.")
    ] = False,
) -> None:
    """Write a GGUF file for llama.cpp; models with memory blocks have none."""
    from midus.cli import console
    from midus.models.gguf_file import export_gguf

    console.quieten_libraries()
    written = export_gguf(model, out, dtype, base, overwrite, console.track)
    size = out.stat().st_size / 1e6
    console.out.print(f"written    {out} ({size:.1f} MB, {written})")

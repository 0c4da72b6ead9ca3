"""`midus report`: one HTML page of runs, models and their results."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_MODEL...",
            help="Run folders, model folders, hub ids, smollm2-135m, or result files.",
        ),
    ],
    results: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of results, besides the targets' own and analysis/."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "report.html"
    ),
    title: Annotated[
        str | None, typer.Option(help="Heading of the page; default: the targets' names.")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace a file that is no report; a report always is."),
    ] = False,
) -> None:
    """Write one self-contained page: stack, parameters, curves, evaluations, heads and slots."""
    from midus.cli import console
    from midus.report import collect, render, write_page
    from midus.report.analyses import missing_figures
    from midus.report.page import check_output

    console.quieten_libraries()
    check_output(output, overwrite)
    with console.err.status("reading"):
        collection = collect(targets, results or [])
        html = render(collection, title)
    write_page(output, html, overwrite)
    shown = list(collection.general)
    for subject in collection.subjects:
        console.out.print(f"{subject.label}: {', '.join(subject.found()) or 'nothing'}")
        if absent := subject.missing():
            console.out.print(f"  not found: {', '.join(absent)}", style="dim")
        shown += subject.results
    for result in collection.general:
        console.out.print(f"{result.path}: {result.kind}, of no model")
    for picture in missing_figures(shown):
        console.out.print(f"picture    {picture} is missing or no PNG", style="yellow")
    if collection.ignored:
        paths = ", ".join(str(result.path) for result in collection.ignored)
        console.out.print(f"ignored    results of other models: {paths}", style="yellow")
    console.out.print(f"written    {output} ({len(html.encode(errors='replace')) / 1e3:,.0f} kB)")

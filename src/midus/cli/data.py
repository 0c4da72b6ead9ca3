"""`midus data`: text into tokens on disk, and what such a folder holds."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from midus.errors import MidusError

data = typer.Typer(
    help="Tokenise text once into memory-mapped files, and describe such a folder.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@data.callback()
def _group() -> None:
    pass


@data.command()
def build(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="Files, folders, patterns or hub dataset ids."),
    ],
    tokenizer: Annotated[str, typer.Option(help="Model whose tokenizer is used.")],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    tokens: Annotated[
        int | None, typer.Option(help="Training tokens wanted; default: all there are.")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Share of each source in --tokens, as in 0.9,0.1; default: by size.")
    ] = "",
    held_out: Annotated[
        float, typer.Option(help="Share of documents kept apart by a hash of their content.")
    ] = 0.01,
    eval_tokens: Annotated[int, typer.Option(help="Most held-out tokens.")] = 262_144,
    test: Annotated[
        float, typer.Option(help="Share of documents kept apart for a last test, likewise.")
    ] = 0.0,
    test_tokens: Annotated[int, typer.Option(help="Most test tokens.")] = 262_144,
    seed: Annotated[int, typer.Option(help="Seed of the order of the documents.")] = 0,
    text_field: Annotated[str, typer.Option(help="Field of a row that holds its text.")] = "text",
    name: Annotated[str | None, typer.Option(help="Configuration of a hub dataset.")] = None,
    split: Annotated[str, typer.Option(help="Split of a hub dataset.")] = "train",
    files: Annotated[
        str | None, typer.Option(help="Patterns of files inside a hub dataset, with commas.")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(help="Parts of the work; default: by files and workers.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Parts worked on at once; default: one a core, 64 on a cluster."),
    ] = None,
    executor: Annotated[str, typer.Option(help="local, ray or slurm.")] = "local",
    slurm_partition: Annotated[str | None, typer.Option(help="Partition of Slurm jobs.")] = None,
    slurm_time: Annotated[str, typer.Option(help="Time limit of a Slurm task.")] = "12:00:00",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is a token folder.")
    ] = False,
) -> None:
    """Tokenise text into a folder; the same command gives the same bytes.

    Documents are shuffled, each is ended by the EOS token, and a share of them is held out. Rows
    that cannot be used are counted and named in the folder's manifest.
    """
    from midus.cli import console
    from midus.data.build import build_tokens
    from midus.data.executors import SlurmOptions
    from midus.data.options import SourceOptions

    shares = _weights(weights, sources)
    options = [
        SourceOptions(
            path=path, name=name, split=split, files=files, text_field=text_field, weight=share
        )
        for path, share in zip(sources, shares, strict=True)
    ]
    console.quieten_libraries()
    folder = build_tokens(
        options,
        tokenizer,
        out,
        max_tokens=tokens,
        held_out=held_out,
        eval_tokens=eval_tokens,
        test=test,
        test_tokens=test_tokens,
        seed=seed,
        by_weight=bool(weights) or len(sources) == 1,
        tasks=tasks,
        workers=_default_workers(executor) if workers is None else workers,
        executor=executor,
        slurm=SlurmOptions(partition=slurm_partition, time=slurm_time),
        overwrite=overwrite,
        track=console.track,
    )
    if folder is None:
        console.out.print(f"submitted  {out} appears when the last job has ended")
        return
    _print_folder(folder)
    for note in _shortfalls(folder.manifest, tokens, shares if weights else None):
        console.out.print(f"note       {note}", style="yellow")


def _shortfalls(
    manifest: dict[str, Any], tokens: int | None, weights: list[float] | None
) -> list[str]:
    """Where sources had fewer tokens than were asked for."""
    if tokens is None:
        return []
    if weights is None:
        found = manifest["splits"]["train"]["tokens"]
        short = found < tokens
        return [f"{found:,} tokens are all there are, and {tokens:,} were asked for"] * short
    notes = []
    for number, (source, weight) in enumerate(zip(manifest["sources"], weights, strict=True), 1):
        wanted, found = int(tokens * weight / sum(weights)), source["train"]["tokens"]
        if found < wanted:
            notes.append(
                f"source {number} has {found:,} tokens, and its weight asks for {wanted:,}; the "
                "mixture is not as its weights say"
            )
    return notes


@data.command()
def info(
    folder: Annotated[Path, typer.Argument(help="Folder that `midus data build` made.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the manifest instead of text.")
    ] = False,
) -> None:
    """Show what a token folder holds, and check that it is whole."""
    from midus.cli import console
    from midus.data.tokens import TokenFolder

    opened = TokenFolder(folder)
    opened.check_contents(console.track)
    if as_json:
        print(json.dumps(opened.manifest, indent=2, ensure_ascii=False))
    else:
        _print_folder(opened)


def _print_folder(folder: Any) -> None:
    from midus.cli import console

    manifest = folder.manifest
    tokenizer = manifest["tokenizer"]
    rows = [
        [
            f"{number}",
            *(f"{source[s][k]:,}" for s in ("train", "held_out") for k in ("documents", "tokens")),
            f"{source['bad_rows']:,}",
        ]
        for number, source in enumerate(manifest["sources"], start=1)
    ]
    columns = ["source", "documents", "tokens", "held out", "tokens", "bad rows"]
    console.print_table(str(folder.path), columns, rows)
    for number, source in enumerate(manifest["sources"], start=1):
        console.out.print(f"source {number:<3} {source['path']}")
    console.out.print(
        f"tokenizer  {tokenizer['source']}, {tokenizer['vocab_size']:,} tokens, "
        f"sha256 {tokenizer['sha256'][:12]}, stored as {manifest['dtype']}"
    )
    for split, facts in manifest["splits"].items():
        console.out.print(
            f"{split:<10} {facts['tokens']:>15,} tokens in {len(facts['files'])} files"
        )
    for bad in manifest["bad_rows"]["first"]:
        console.out.print(f"bad row    {bad['where']}: {bad['reason']}", style="yellow")


def _default_workers(executor: str) -> int:
    return os.cpu_count() or 1 if executor == "local" else 64


def _weights(text: str, sources: list[str]) -> list[float]:
    if not text:
        return [1.0] * len(sources)
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != len(sources):
        raise MidusError(
            f"weights={text!r} is no list of {len(sources)} numbers, one a source, such as 0.9,0.1"
        )
    return shares

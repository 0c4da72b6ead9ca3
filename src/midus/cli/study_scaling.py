"""`midus study scaling`: loss against slots or tokens, a law through it, and what it predicts."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from midus.cli.options import parse_names
from midus.errors import MidusError


def scaling(
    folder: Annotated[Path, typer.Argument(help="Folder of a study.")],
    over: Annotated[str, typer.Option(help="The axis: slots (of a head, N = n²) or tokens.")] = (
        "slots"
    ),
    at: Annotated[
        str | None, typer.Option(help="Where to predict the loss, with commas, as in 1e8,1e9.")
    ] = None,
    curves: Annotated[
        bool,
        typer.Option("--curves", help="Over tokens: take points inside runs, not their ends."),
    ] = False,
    assume: Annotated[
        bool,
        typer.Option("--predict", help="Over slots: say what other models would see, if …"),
    ] = False,
    known: Annotated[
        list[str] | None,
        typer.Option(help="With --predict: a loss elsewhere, as in 1b=LOSS@4096 (slots)."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Default: scaling-AXIS.json in the folder.")
    ] = None,
) -> None:
    """Fit L(x) = E + A x^-alpha to a study's validation losses; say where that means nothing.

    What the figures mean, and what they do not: docs/scaling.md.
    """
    _check(over, curves, assume, known)
    places = [_positive("at", part) for part in parse_names("at", at)]
    losses = [_known(text) for text in known or []]
    import importlib.util

    from midus.cli import console
    from midus.cli.study_scaling_tables import print_scaling, to_json
    from midus.reports import write_json
    from midus.studies.scaling import make_scaling

    found = make_scaling(folder, over, curves)
    print_scaling(found, places, losses, assume)
    written = [json_path or folder / f"scaling-{over}.json"]
    try:
        write_json(written[0], to_json(found, places, losses, assume))
        if importlib.util.find_spec("matplotlib") is not None:
            from midus.studies.scaling_plots import plot_scaling

            written.append(folder / f"scaling-{over}.png")
            plot_scaling(found, places, written[1], f"{folder.resolve().name}: loss over {over}")
    except OSError as error:
        raise MidusError(f"{written[-1]} cannot be written ({error.strerror})") from error
    console.out.print(f"\nwritten    {', '.join(map(str, written))}")
    if len(written) == 1:
        console.out.print("picture    none, because matplotlib is not installed")


def _check(over: str, curves: bool, assume: bool, known: Any) -> None:
    if over not in ("slots", "tokens"):
        raise MidusError(f"over={over!r} is no axis; choose slots or tokens")
    if curves and over != "tokens":
        raise MidusError("--curves are points over tokens; add --over tokens")
    if assume and over != "slots":
        raise MidusError("--predict is about slots; leave it out over tokens")
    if known and not assume:
        raise MidusError("--known goes with --predict; add it")


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1):
        raise MidusError(f"{name}={text.strip()!r} must be a number from 1, as in 1e9")
    return value


def _known(text: str) -> tuple[str, float, float]:
    name, _, rest = text.partition("=")
    loss, _, slots = rest.partition("@")
    try:
        value = float(loss)
    except ValueError:
        value = math.nan
    if not (name and math.isfinite(value) and value > 0):
        raise MidusError(f"known={text!r} must be a name, a loss and slots, as in 1b=LOSS@4096")
    return name, value, _positive(f"slots of known {name}", slots)

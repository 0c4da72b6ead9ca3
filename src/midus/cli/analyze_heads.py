"""`midus analyze heads`: importance of every attention head, beside the base's."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from midus.cli import options
from midus.cli.analysis_folder import analysis_folder, analysis_name


def heads(
    model: Annotated[str, typer.Argument(help="A grown model, full or delta, or a base alone.")],
    base: Annotated[
        str | None, typer.Option(help="Its base; default: the one the model records.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Rows of goal, sol1, sol2, label or of context, continuation; "
            "default: PIQA's validation split from the hub."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="How many of the first rows; default: all.", min=1)
    ] = None,
    reduction: Annotated[
        Literal["example", "token"],
        typer.Option(help="Absolute value around an example (paper) or around each token."),
    ] = "example",
    loss: Annotated[
        Literal["sum", "mean"], typer.Option(help="Over the tokens of a continuation.")
    ] = "sum",
    layer_norm: Annotated[
        bool, typer.Option("--layer-norm", help="Divide a layer's scores by their L2 norm.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option(help="Examples of a pass; scores differ by rounding only.", min=1)
    ] = 8,
    dtype: options.Dtype = None,
    device: options.Device = None,
    output: options.AnalysisFolder = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure gradient head importance on PIQA, zero-shot: heads.json and heads.png."""
    import torch

    from midus.analysis.examples import load_piqa, read_examples
    from midus.analysis.head_comparison import compare_heads
    from midus.analysis.head_plots import plot_heads
    from midus.cli import console
    from midus.data.rows import require
    from midus.efficiency.hardware import hardware_name
    from midus.models.identity import model_id
    from midus.models.weights import dtype_named
    from midus.reports import write_analysis

    console.quieten_libraries()
    require("matplotlib", "the figure")
    folder = analysis_folder("heads", model, output)
    values = compare_heads(
        model,
        load_piqa(limit) if data is None else read_examples(data, limit),
        base=base,
        reduction=reduction,
        loss=loss,
        layer_norm=layer_norm,
        batch_size=batch_size,
        dtype=dtype_named(dtype) if dtype else None,
        device=device,
        track=console.track,
    )
    folder.mkdir(parents=True, exist_ok=True)
    plot_heads(values, folder / "heads.png", analysis_name(model))
    hardware = hardware_name(torch.device(values["device"]))
    write_analysis(
        folder / "heads.json",
        "midus.heads",
        model,
        model_id(model),
        hardware,
        ["heads.png"],
        {"data": str(data) if data else "baber/piqa", **values},
    )
    if as_json:
        typer.echo((folder / "heads.json").read_text())
        return
    _print(model, values)
    console.out.print(f"written    {folder / 'heads.json'}, {folder / 'heads.png'}")


def _print(model: str, values: dict[str, Any]) -> None:
    from midus.cli.console import out

    kinds = [layer["kind"] for layer in values["layers"]["model"]]
    num_heads = len(values["importance"]["model"][0])
    inserted = len(kinds) - kinds.count("base")
    apart = f" + {inserted} inserted" if inserted else ""
    out.print(
        f"{values['num_examples']:,} examples of {values['task']}, {values['dtype']} on "
        f"{values['device']}; loss: {values['loss']} over the continuation, "
        f"absolute value: each {values['reduction']}"
    )
    out.print(f"model      {model}: {kinds.count('base')}{apart} layers of {num_heads} heads")
    summary = values["summary"]
    if summary is None:
        return
    importance, gini = summary["mean_importance"], summary["mean_gini"]
    ratio = summary["median_variance_ratio"]
    out.print(f"base       {values['base']['model']}")
    out.print(
        f"variance   higher than in the base in {summary['num_layers_of_higher_variance']} of its "
        f"{summary['num_base_layers']} layers"
        + ("" if ratio is None else f"; median ratio {ratio:.3g}")
    )
    out.print(
        f"mean IS    {importance['base']:.4g} -> {importance['model']:.4g} in the base's layers; "
        f"{100 * summary['share_of_risen_heads']:.0f} % of their heads rose"
    )
    out.print(f"mean Gini  {gini['base']:.4f} -> {gini['model']:.4f} within these layers")

"""`midus analyze theorem`: the structural theorem, checked in numbers and drawn."""

from pathlib import Path
from typing import Annotated, Any

import typer

from midus.cli import options
from midus.cli.analysis_folder import analysis_folder
from midus.errors import MidusError


def theorem(
    model: Annotated[
        str | None,
        typer.Argument(help="A model with memory blocks, full or delta; default: none."),
    ] = None,
    instances: Annotated[int, typer.Option(help="Random instances to check.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the instances.")] = 0,
    base: Annotated[
        str | None, typer.Option(help="For a delta: its base, if not where it says.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text to read: .txt, or rows with a field `text`; default: a packaged sample."
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(help="Memory block by its index in the final stack; default: the middle one."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="How much of the text to read.", min=1)] = 512,
    dtype: options.Dtype = None,
    device: options.Device = None,
    output: options.AnalysisFolder = None,
    as_json: options.AsJson = False,
) -> None:
    """Check the paper's propositions and theorem on random instances, and on a model's retrieval.

    Exit code 1 where one does not hold.
    """
    for name, value in (("base", base), ("text", text), ("block", block)):
        if model is None and value is not None:
            raise MidusError(f"{name}={str(value)!r} was given without a model; give MODEL too")
    from midus.analysis.theorem_checks import check_random_instances
    from midus.analysis.theorem_curves import heterogeneity_curve, random_rank_curves
    from midus.analysis.theorem_plots import plot_theorem
    from midus.cli import console
    from midus.data.rows import require
    from midus.models.identity import model_id
    from midus.reports import machine_name, write_analysis

    console.quieten_libraries()
    require("matplotlib", "the figure")
    folder = analysis_folder("theorem", model, output)
    found = check_random_instances(instances, seed, console.track)
    failures = [f"on random instances {failure}" for failure in found.failures()]
    curves = random_rank_curves(seed)
    hardware, model_check = machine_name(), None
    if model is not None:
        more, model_check, hardware = _check_model(model, base, text, block, tokens, dtype, device)
        failures += [f"on the model {failure}" for failure in more.failures()]
    values = {
        "instances": instances,
        "seed": seed,
        "max_equality_error": found.max_equality_error,
        "max_bound_violation": found.max_bound_violation,
        "min_strict_gap": found.min_strict_gap,
        "counter_example_gap": found.counter_example_gap,
        "heterogeneity": heterogeneity_curve(seed),
        "rank_curve": curves["exact"].to_dict(),
        "near_rank_curve": curves["near"].to_dict(),
        "model_check": model_check,
    }
    folder.mkdir(parents=True, exist_ok=True)
    plot_theorem(values, folder / "theorem.png")
    write_analysis(
        folder / "theorem.json",
        "midus.theorem",
        model,
        model_id(model) if model else None,
        hardware,
        ["theorem.png"],
        values,
    )
    if as_json:
        typer.echo((folder / "theorem.json").read_text())
    else:
        _print(values)
        console.out.print(f"written      {folder / 'theorem.json'}, {folder / 'theorem.png'}")
    if failures:
        console.err.print(f"midus: {'; '.join(failures)}")
        raise typer.Exit(1)


def _check_model(
    model: str,
    base: str | None,
    text: Path | None,
    block: int | None,
    tokens: int,
    dtype: str | None,
    device: str | None,
) -> tuple[Any, dict[str, Any], str]:
    """Findings, numbers for the file, and where the model ran."""
    from midus.analysis.retrieval_matrices import collect_retrieval
    from midus.analysis.slots import check_memory
    from midus.analysis.theorem_model import check_model
    from midus.cli import console
    from midus.data.ids import read_ids
    from midus.efficiency.hardware import hardware_name
    from midus.evaluation.verify import sample_text
    from midus.models.configuration import read_config
    from midus.models.loading import load_model, load_tokenizer
    from midus.models.sources import resolve_source
    from midus.models.weights import dtype_named

    check_memory(read_config(resolve_source(model)), block)
    tokenizer = load_tokenizer(model)
    if text is None:
        ids = tokenizer(sample_text(), return_tensors="pt").input_ids[0]
    else:
        ids = read_ids(text, tokenizer, tokens + 1)
    loaded = load_model(
        model, base=base, dtype=dtype_named(dtype) if dtype else None, device=device
    )
    collected = collect_retrieval(loaded, ids[: tokens + 1], block, track=console.track)
    with console.err.status("solving least squares"):
        found, values = check_model(collected)
    values["text"] = str(text) if text else None
    return found, values, hardware_name(loaded.device)


def _print(values: dict[str, Any]) -> None:
    from midus.cli import console

    out = console.out
    out.print(f"{values['instances']:,} random instances, float64", style="bold")
    out.print(f"equalities   largest relative error {values['max_equality_error']:.1e}")
    out.print(f"bounds       largest relative violation {values['max_bound_violation']:.1e}")
    out.print(
        "strict gap   smallest (L_Share - L_HIVE) / L_Share where Theorem 1 promises one: "
        f"{_percent(values['min_strict_gap'])}"
    )
    out.print(
        f"no gap       where projected targets are identical: {values['counter_example_gap']:.1e}"
    )
    if values["model_check"]:
        _print_model(values["model_check"])


def _print_model(model: dict[str, Any]) -> None:
    from midus.cli import console

    out = console.out
    own, common = model["own_retrieval"], model["common_retrieval"]
    curve, needed = common["rank_curve"], common["ranks_needed"]
    whose = f"head {common['head']}'s A"
    out.print(
        f"block {model['block']} of the model, {model['num_heads']} heads, "
        f"{model['num_tokens']:,} tokens",
        style="bold",
    )
    out.print(f"equalities   largest relative error {model['max_equality_error']:.1e}")
    out.print(f"bounds       largest relative violation {model['max_bound_violation']:.1e}")
    out.print(
        f"own A_h      loss {own['shared_loss']:.4f} shared, {own['headwise_loss']:.4f} head-wise "
        f"(gap {_percent(own['gap'])}), HIVE at most {own['refitted_loss']:.4f}"
    )
    for row in own["truncated"]:
        out.print(
            f"             HIVE from truncated banks, r = {row['rank']}: {row['loss']:.4f}, "
            f"bound {row['bound']:.4g}"
        )
    out.print(
        f"             {model['slots_read_by_several']:,} of {model['slots_read']:,} slots are "
        "read by more than one head; Theorem 1 asks for one A"
    )
    out.print(
        f"{whose:<12} loss {curve['shared_loss']:.4f} shared, "
        f"{curve['headwise_loss']:.4f} head-wise (gap {_percent(common['gap'])})"
    )
    theorem_rank, gap = common["theorem"]["rank"], common["theorem"]["gap"]
    out.print(f"theorem      targets cut to r = {theorem_rank}: gap {_percent(gap)}")
    out.print(
        f"targets      as they are: HIVE beats sharing from r = {needed['below_shared']}, closes "
        f"90 % of the way to head-wise banks at r = {needed['90_percent']}, 99 % at "
        f"r = {needed['99_percent']}"
    )


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.1f} %" if percent >= 0.1 else f"{percent:.2g} %"

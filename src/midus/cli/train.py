"""`midus train`: one YAML file in, a better model out."""

from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run; see configs/.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option, as in optimizer.lr=1e-4.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print options, parameter groups and steps; read no weights or data."
        ),
    ] = False,
) -> None:
    """Train a model that grows first, or has grown: continual pre-training or fine-tuning.

    With torchrun or accelerate launch in front, on several devices and machines.
    """
    from dataclasses import replace

    from midus.cli import console
    from midus.training.options import read_options

    console.quieten_libraries()
    options = read_options(config, settings or [])
    options = replace(options, optimizer=options.optimizer.resolved(options.stage))
    if dry_run:
        _print_plan(options)
        return
    from midus.training.distributed import is_first_rank, leave_together
    from midus.training.run import train as run

    def say(sentence: str) -> None:
        if is_first_rank():
            console.err.print(sentence)

    result = run(options, resume=resume, track=console.track, say=say)
    if is_first_rank():
        _print_result(result)
    leave_together()


def _print_result(result: Any) -> None:
    from midus.cli import console

    before, after = (result.losses[f"{when}_perplexity"] for when in ("before", "after"))
    if before is not None and after is not None:
        console.out.print(f"held-out   perplexity {before:.3f} -> {after:.3f}")
    console.out.print(f"steps      {result.steps:,} ({result.tokens:,} tokens)")
    console.out.print(f"written    {result.model}")
    if result.plot:
        console.out.print(f"picture    {result.plot}")
    else:
        console.out.print("picture    none, because matplotlib is not installed")


def _print_plan(options: Any) -> None:
    import yaml

    from midus.cli import console
    from midus.training.dry_run import describe_run

    console.out.print(yaml.safe_dump(options.to_dict(), sort_keys=False).rstrip())
    plan = describe_run(options)
    console.out.print()
    rows = [
        [g["name"], f"{g['tensors']:,}", f"{g['parameters']:,}",
         f"{g['lr']:g}" + " x weights" * g["is_relative"] + ", by stream" * g["is_by_stream"]
         + ", muon" * g["is_muon"],
         g["rate"], f"{g['weight_decay']:g}"]
        for g in plan["groups"]
    ]  # fmt: skip
    console.print_table(
        "parameter groups", ["group", "tensors", "parameters", "lr", "rate", "weight decay"], rows
    )
    total, trained = plan["parameters"], plan["trainable"]
    console.out.print(f"parameters {total:,}, of which {trained:,} train")
    console.out.print(
        f"step       {plan['batch_size']:,} sequences, at most {plan['tokens_a_step']:,} tokens"
    )
    console.out.print(f"run        {plan['length']}")

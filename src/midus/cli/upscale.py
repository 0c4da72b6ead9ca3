"""`midus upscale`: a stored base becomes a deeper checkpoint that computes the same."""

from pathlib import Path
from typing import Annotated

import typer

from midus.cli import options
from midus.config import UpscaleConfig
from midus.errors import MidusError

# Methods that change the function say by how much, where running both models costs little.
_MEASURED_UP_TO = 1_000_000_000


@options.with_upscale_options
def upscale(
    base: Annotated[
        str, typer.Argument(help="Model folder, hub id, .gguf file, or smollm2-135m (embedded).")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    delta: Annotated[
        bool, typer.Option("--delta/--full", help="Write the inserted tensors only, or all.")
    ] = False,
    hash_all: Annotated[
        bool, typer.Option("--hash-all", help="Fingerprint every element of the base.")
    ] = False,
    dtype: options.Dtype = None,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be made; read no weights.")
    ] = False,
    as_json: options.AsJson = False,
    config: UpscaleConfig,
) -> None:
    """Insert blocks into a stored model and prove that it still computes the same."""
    from midus.cli import console
    from midus.evaluation.verify import verify
    from midus.models.atomic import check_target
    from midus.models.configuration import read_config
    from midus.models.record import base_of
    from midus.models.sources import resolve_source
    from midus.models.weights import dtype_named
    from midus.upscaling import upscale_checkpoint
    from midus.upscaling.inspect import describe, plan_of
    from midus.upscaling.methods import plan_upscaling, remarks
    from midus.upscaling.stored import refuse_delta

    console.quieten_libraries()
    torch_dtype = dtype_named(dtype) if dtype else None
    check_target(out, overwrite)
    refuse_delta(config, delta)
    _, planned = plan_upscaling(read_config(resolve_source(base, config_only=True)), config, {})
    facts = describe(planned)
    notes = remarks(config.memory) if config.method == "midus" else []
    if not as_json:
        console.print_stack(plan_of(planned).blocks)
        console.print_facts(facts)
        console.print_notes(notes)
    result: dict[str, object] = {**facts, "notes": notes, "written": False}
    if not dry_run:
        done = upscale_checkpoint(
            base,
            out,
            config,
            delta=delta,
            dtype=torch_dtype,
            overwrite=overwrite,
            hash_all=hash_all,
            track=console.track,
        )
        result |= {
            "written": True,
            "out": str(done.folder),
            "checkpoint": "delta" if delta else "full",
            "bytes": done.num_bytes,
            "base_fingerprint": base_of(done.config)["fingerprint"],
            "identity_blocks": done.identity_blocks,
            "equal_base_tensors": done.equal_base_tensors,
        }
        if not as_json:
            console.out.print(f"written    {done.folder} ({done.num_bytes / 1e6:,.1f} MB)")
        change = None
        if done.identity_blocks is None and facts["params"]["total"] <= _MEASURED_UP_TO:
            try:
                change = verify(base, out, max_tokens=64, track=console.track).max_abs_logit_diff
                result["max_abs_logit_diff"] = change
            except MidusError as error:  # the model is written all the same
                console.err.print(f"note       not measured: {error}", style="yellow")
        if not as_json:
            console.print_proof(done, base, change)
    if as_json:
        console.print_json(result)

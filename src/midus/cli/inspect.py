"""`midus inspect`: what a checkpoint is, or what a base would become."""

from typing import Annotated

import typer

from midus.cli import options
from midus.config import UpscaleConfig
from midus.errors import MidusError


@options.with_upscale_options
def inspect(
    target: Annotated[
        str,
        typer.Argument(help="Checkpoint folder, hub id, or a built-in shape such as llama-3.1-8b."),
    ],
    *,
    as_json: options.AsJson = False,
    config: UpscaleConfig,
) -> None:
    """Print stack, parameters and slots. The options say how a base would be up-scaled."""
    from midus.cli import console
    from midus.models.families import is_upscaled
    from midus.models.record import record_of
    from midus.upscaling.inspect import describe, plan_of, target_config
    from midus.upscaling.methods import plan_upscaling, remarks

    console.quieten_libraries()
    model_config = target_config(target)
    has_options = config != UpscaleConfig()
    if has_options and is_upscaled(model_config.model_type):
        raise MidusError(
            f"{target} is up-scaled already; the options say how a base would be, so leave them out"
        )
    if has_options or not record_of(model_config):
        _, model_config = plan_upscaling(model_config, config, {})
    facts = describe(model_config)
    if as_json:
        console.print_json(facts)
    else:
        console.print_stack(plan_of(model_config).blocks)
        console.print_facts(facts)
        if is_upscaled(model_config.model_type):
            console.print_notes(remarks(model_config.memory_config))

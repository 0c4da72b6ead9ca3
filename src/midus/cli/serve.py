"""`midus serve`: an OpenAI-compatible server of any model, on vLLM."""

import os
import sys
from typing import Annotated

import typer

from midus.errors import MidusError


def serve(
    model: Annotated[str, typer.Argument(help="A base or a grown model, full or delta.")],
    extra: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VLLM_OPTIONS",
            help="After --: options of vLLM's own, such as --dtype or --max-model-len.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one of the machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=1, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; default: MODEL.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Where a delta's base is, if not where it says.")
    ] = None,
) -> None:
    """Serve a model to OpenAI clients; a delta is merged on first use."""
    from midus.serving.server import (
        require_plugin,
        require_vllm,
        server_command,
        server_environment,
    )

    if extra and not extra[0].startswith("-"):
        raise MidusError(f"{extra[0]!r} is one argument too many; put options of vLLM after --")
    vllm = require_vllm()

    from midus.cli import console
    from midus.models.configuration import read_config
    from midus.models.families import is_upscaled
    from midus.serving.merged import whole_model

    console.quieten_libraries()
    served = whole_model(model, base, console.track)
    if is_upscaled(read_config(served.folder).model_type):
        require_plugin()
    if served.is_delta:
        when = "made earlier" if served.is_reused else "made once, to be used again"
        console.out.print(f"merged     {served.folder} ({when})")
    called = name or model
    console.out.print(f"serving    {called} at http://{host}:{port}/v1")
    command = server_command(vllm, served.folder, called, host, port, extra or ())
    sys.stdout.flush()
    # In place of this process, so that signals reach the server.
    os.execve(command[0], command, server_environment())

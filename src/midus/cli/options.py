"""Options that several commands share.

The options of an up-scaling are the fields of its config: `with_upscale_options` turns each field,
its type, default and docstring, into an option, and hands the command the config they make up.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from midus.config import MemoryConfig, UpscaleConfig, field_help
from midus.errors import MidusError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT if it is a model folder.")
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")
]
AnalysisFolder = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder to write to; default: analysis/<run>."),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: the GPU if there is one.")
]

# Where the command line's word is shorter than the field's name.
_OPTION_NAMES = {"num_inserted": "inserted", "kind": "memory"}


def with_upscale_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of an up-scaling and passes them to it as ``config``."""
    added = _parameters()

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        chosen = {parameter.name: kwargs.pop(parameter.name) for parameter in added}
        command(*args, config=_make_config(chosen), **kwargs)

    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.name != "config"]
    signature = signature.replace(parameters=[*own, *added])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapper


def parse_names(option: str, text: str | None) -> list[str]:
    """Names with commas between them; none where the option is not given.

    Args:
        option: What it is called, for messages.
        text: What was given.
    """
    names = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and not names:
        raise MidusError(f"{option}={text!r} names nothing; give one or more, or leave it out")
    return names


def _parameters() -> list[inspect.Parameter]:
    parameters = []
    for cls in (UpscaleConfig, MemoryConfig):
        types, texts = get_type_hints(cls), field_help(cls)
        for field in fields(cls):
            if types[field.name] is MemoryConfig:
                continue  # its own fields follow
            name = _OPTION_NAMES.get(field.name, field.name)
            kind, text = types[field.name], texts[field.name]
            if field.name == "positions":
                kind, text = str | None, f"{text} As in 1,4,7."
            dashed = name.replace("_", "-")
            flag = {bool: [f"--{dashed}"], bool | None: [f"--{dashed}/--no-{dashed}"]}.get(kind, [])
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=Annotated[kind, typer.Option(*flag, help=text)],
                )
            )
    return parameters


def _make_config(chosen: dict[str, Any]) -> UpscaleConfig:
    def values(cls: type) -> dict[str, Any]:
        names = {f.name: _OPTION_NAMES.get(f.name, f.name) for f in fields(cls)}
        return {field: chosen[option] for field, option in names.items() if option in chosen}

    upscaling = values(UpscaleConfig)
    upscaling["positions"] = _parse_positions(chosen["positions"])
    upscaling["memory"] = MemoryConfig(**values(MemoryConfig))
    return UpscaleConfig(**upscaling)


def _parse_positions(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise MidusError(
            f"positions={text!r} is not a list of whole numbers; write it as in 1,4,7"
        ) from error

"""Options that several commands share; their help comes from the config fields they set."""

from typing import Annotated, Any

import typer

from midus.config import MemoryConfig, UpscaleConfig, field_help
from midus.errors import MidusError

_UPSCALE = field_help(UpscaleConfig)
_MEMORY = field_help(MemoryConfig)

Method = Annotated[str, typer.Option(help=_UPSCALE["method"])]
Memory = Annotated[str, typer.Option(help=_MEMORY["kind"])]
Inserted = Annotated[int | None, typer.Option(help=_UPSCALE["num_inserted"])]
Placement = Annotated[str | None, typer.Option(help=_UPSCALE["placement"])]
Positions = Annotated[str | None, typer.Option(help=_UPSCALE["positions"] + " As in 1,4,7.")]
NumSubkeys = Annotated[int, typer.Option(help=_MEMORY["num_subkeys"])]
TopK = Annotated[int, typer.Option(help=_MEMORY["top_k"])]
LatentDim = Annotated[int | None, typer.Option(help=_MEMORY["latent_dim"])]
QueryNorm = Annotated[str, typer.Option(help=_MEMORY["query_norm"])]
AttentionResidual = Annotated[
    bool, typer.Option("--attention-residual", help=_MEMORY["attention_residual"])
]
AttnOutputProj = Annotated[
    bool, typer.Option("--attn-output-proj", help=_MEMORY["attn_output_proj"])
]
MemoryOutputProj = Annotated[
    bool, typer.Option("--memory-output-proj", help=_MEMORY["memory_output_proj"])
]
KeyInit = Annotated[str, typer.Option(help=_MEMORY["key_init"])]
ValueProjInit = Annotated[str, typer.Option(help=_MEMORY["value_proj_init"])]
Seed = Annotated[int, typer.Option(help=_UPSCALE["seed"])]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT if it is a model folder.")
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: the GPU if there is one.")
]


def make_upscale_config(
    *,
    positions: str | None,
    inserted: int | None,
    seed: int,
    method: str,
    placement: str | None,
    memory: str,
    **memory_options: Any,
) -> UpscaleConfig:
    """The config that the options of `upscale` and `inspect` describe."""
    return UpscaleConfig(
        method=method,
        num_inserted=inserted,
        placement=placement,
        positions=_parse_positions(positions),
        memory=MemoryConfig(kind=memory, **memory_options),
        seed=seed,
    )


def _parse_positions(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise MidusError(
            f"positions={text!r} is not a list of whole numbers; write it as in 1,4,7"
        ) from error

"""`midus verify`: two whole models, one after the other, on a text."""

from pathlib import Path
from typing import Annotated

import typer

from midus.cli import options
from midus.errors import MidusError


def verify(
    base: Annotated[str, typer.Argument(help="The base, as `midus upscale` takes it.")],
    upscaled: Annotated[str, typer.Argument(help="The grown model, full or delta.")],
    text: Annotated[
        Path | None, typer.Option(help="Text file to read; default: a packaged sample.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="How much of the text to read.", min=2)] = 1024,
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare logits, KL divergence and perplexity of a base and its up-scaled model."""
    content = _read(text)
    from midus.cli import console
    from midus.evaluation.verify import verify as run
    from midus.models.weights import dtype_named

    console.quieten_libraries()
    result = run(
        base,
        upscaled,
        content,
        max_tokens=max_tokens,
        dtype=dtype_named(dtype) if dtype else None,
        device=device,
        track=console.track,
    )
    if as_json:
        console.print_json({"base": base, "upscaled": upscaled, **result.to_dict()})
        return
    console.out.print(f"{result.num_tokens} tokens, {result.dtype} on {result.device}")
    console.out.print(f"largest |Δ logit|      {result.max_abs_logit_diff!r}")
    console.out.print(f"mean KL(base ‖ grown)  {result.mean_kl:.6g}")
    console.out.print(f"perplexity, base       {result.base_perplexity:.4f}")
    console.out.print(f"perplexity, grown      {result.upscaled_perplexity:.4f}")


def _read(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MidusError(f"{path} cannot be read as text ({error}); give a UTF-8 file") from error

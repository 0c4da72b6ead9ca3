"""`midus generate`: a prompt in, text streamed out."""

from typing import Annotated

import typer

from midus.cli import options
from midus.errors import MidusError


def generate(
    model: Annotated[str, typer.Argument(help="A base or an up-scaled model, full or delta.")],
    prompt: Annotated[str, typer.Option(help="What the model continues or answers.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many tokens.", min=1)] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; more is more random.", min=0.0)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=2**32 - 1)] = 0,
    base: Annotated[
        str | None, typer.Option(help="Where a delta's base is, if not where it says.")
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
) -> None:
    """Stream a continuation of the prompt."""
    import torch
    from transformers import TextStreamer

    from midus.cli import console
    from midus.models.loading import load_model, load_tokenizer
    from midus.models.weights import dtype_named

    console.quieten_libraries()
    tokenizer = load_tokenizer(model)
    if chat and tokenizer.chat_template is None:
        raise MidusError(f"{model} has no chat template; leave out --chat")
    inputs = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        if chat
        else tokenizer(prompt, return_tensors="pt")
    )
    if inputs["input_ids"].shape[1] == 0:
        raise MidusError("the prompt is empty; give some text")
    loaded = load_model(
        model, base=base, dtype=dtype_named(dtype) if dtype else None, device=device
    )
    torch.manual_seed(seed)
    loaded.generate(
        **inputs.to(loaded.device),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True),
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_p=None,
        top_k=None,
    )

"""`midus generate`: a prompt in, text streamed out."""

import contextlib
import functools
from typing import Annotated, Any

import typer

from midus.cli import options
from midus.errors import MidusError

# Below it scores of tokens overflow.
_COLDEST = 1e-6


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
    fast: Annotated[
        bool, typer.Option("--fast", help="Decode by CUDA graphs and fused kernels.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="With --fast: say where plain greedy decoding differs."),
    ] = False,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Switch the memory blocks off: the base's answer.")
    ] = False,
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
    from midus.models.configuration import read_config
    from midus.models.families import is_upscaled
    from midus.models.fast import first_difference, generate_fast
    from midus.models.loading import load_model, load_tokenizer
    from midus.models.sources import resolve_source
    from midus.models.weights import dtype_named

    console.quieten_libraries()
    if compare and (not fast or temperature > 0):
        raise MidusError(
            "--compare is for greedy decoding with --fast; give --fast, no temperature"
        )
    if no_memory and not is_upscaled(read_config(resolve_source(model)).model_type):
        raise MidusError(f"{model} has no memory blocks to switch off; leave out --no-memory")
    tokenizer = load_tokenizer(model)
    if chat and tokenizer.chat_template is None:
        raise MidusError(f"{model} has no chat template; leave out --chat")
    if 0 < temperature < _COLDEST:
        raise MidusError(
            f"temperature={temperature:g} is too small to draw with; give 0 for the "
            f"likeliest token, or {_COLDEST:g} and more"
        )
    inputs = (
        _chat_inputs(tokenizer, prompt, model) if chat else tokenizer(prompt, return_tensors="pt")
    )
    ids = inputs["input_ids"]
    if ids.shape[1] == 0:
        raise MidusError("the prompt is empty; give some text")
    config = read_config(resolve_source(model))
    if int(ids.max()) >= config.vocab_size:
        raise MidusError(
            f"{model} has a vocabulary of {config.vocab_size}, and its tokenizer gives token "
            f"{int(ids.max())}; use the tokenizer that belongs to it"
        )
    loaded = load_model(
        model, base=base, dtype=dtype_named(dtype) if dtype else None, device=device
    )
    length, positions = ids.shape[1] + max_new_tokens, config.max_position_embeddings
    if length > positions:
        console.err.print(
            f"note       prompt and new tokens are {length}, and the model was made for "
            f"{positions}; what it writes beyond may make no sense",
            style="yellow",
        )
    torch.manual_seed(seed)
    run = functools.partial(generate_fast, loaded) if fast else loaded.generate
    with loaded.memory_disabled() if no_memory else contextlib.nullcontext():
        run(
            **inputs.to(loaded.device),
            max_new_tokens=max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True),
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_p=None,
            top_k=None,
        )
        if compare:
            difference = first_difference(loaded, inputs["input_ids"], max_new_tokens)
            console.err.print(_told(difference))


def _chat_inputs(tokenizer: Any, prompt: str, model: str) -> Any:
    from midus.models.untrusted import reason_of

    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    except Exception as error:  # whatever a template raises
        raise MidusError(
            f"{model} has a chat template that fails ({reason_of(error)}); leave out --chat"
        ) from error


def _told(difference: Any) -> str:
    if difference is None:
        return "plain decoding gives the same tokens"
    return (
        f"plain decoding differs from new token {difference.token + 1} on, where it prefers its "
        f"own by {difference.margin:.2g} in log-probability"
    )

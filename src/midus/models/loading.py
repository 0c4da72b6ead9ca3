"""Loads any checkpoint a command takes: base, full or delta, by folder, hub id or name."""

from pathlib import Path
from typing import Any

import torch

from midus.errors import MidusError
from midus.models.checkpoint import DELTA_NAME
from midus.models.configuration import read_config
from midus.models.delta import load_delta
from midus.models.fitting import causal_lm_class, refuse_misfit
from midus.models.record import is_delta
from midus.models.sources import resolve_source
from midus.models.untrusted import reason_of
from midus.models.weights import Weights, require_floats

ADAPTER_NAME = "adapter_config.json"


def load_model(
    source: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Any:
    """A model ready for inference, its weights in memory of their own.

    Weights that stay mapped to their file lie at odd offsets, which can change the last bits of a
    product; a comparison of two models needs them in fresh, aligned memory.

    Args:
        source: A folder, hub id, ``.gguf`` file or ``smollm2-135m``.
        base: For a delta: where its base is, if not where it says.
        dtype: Type to load in; default: the checkpoint's.
        device: Where to put it; default: the GPU if there is one.
    """
    from transformers import AutoModelForCausalLM

    device = checked_device(device)
    folder = resolve_source(source)
    config = read_config(folder)
    delta = is_delta(config)
    if base and not delta:
        raise MidusError(f"base={str(base)!r} was given, but {source} is no delta; leave it out")
    if delta:
        Weights.open_file(folder / DELTA_NAME)
    else:
        weights = Weights.open_folder(folder)
        if not getattr(config, "quantization_config", None):
            refuse_misfit({n: entry.shape for n, entry in weights.items()}, config, source)
            require_floats(weights, source)
        if (folder / ADAPTER_NAME).exists():
            raise MidusError(
                f"{source} has an {ADAPTER_NAME}, by which transformers would load another model; "
                "remove it or merge the adapter"
            )
    options = {"dtype": dtype or "auto", "output_loading_info": True}
    try:
        loaded: Any
        if delta:
            loaded = load_delta(causal_lm_class(config), folder, base, **options)
        else:
            # Never a pickle, never code that came with the weights.
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, use_safetensors=True, trust_remote_code=False, **options
            )
    except MidusError:
        raise
    except Exception as error:
        # A damaged or hostile file fails in as many ways as transformers has steps.
        raise MidusError(
            f"{source} cannot be loaded ({reason_of(error)}); fetch it again"
        ) from error
    model, info = loaded
    if info["missing_keys"]:
        raise MidusError(
            f"{source} lacks {len(info['missing_keys'])} tensors of the model, "
            f"{min(info['missing_keys'])} among them; fetch it again"
        )
    for parameter in model.parameters():  # a tied head is the embedding's own parameter
        parameter.data = parameter.data.clone()
    return model.to(device).eval()


def checked_device(device: str | None) -> str:
    """The device of that name, or the GPU if there is one; refuses what cannot be used."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(device).type == "meta":
            raise RuntimeError("it has no memory")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MidusError(f"device={device!r} cannot be used here ({reason}); try cpu") from error
    return device


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer stored with a model."""
    from transformers import AutoTokenizer

    folder = resolve_source(source)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        # The tokenizers package raises plain `Exception` for a file it cannot read.
        raise MidusError(
            f"{source} has no usable tokenizer ({reason_of(error)}); add its files"
        ) from error

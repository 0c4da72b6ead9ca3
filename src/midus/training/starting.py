"""The model a run starts from: loaded or grown, frozen where it should be, in its precision."""

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from midus.errors import MidusError
from midus.models.card import read_licence
from midus.models.configuration import read_config
from midus.models.delta import holds_its_base
from midus.models.fingerprint import fingerprint
from midus.models.fitting import causal_lm_class
from midus.models.loading import load_model
from midus.models.quantized import inserted_linears
from midus.models.record import inserted_positions, is_delta, update_record
from midus.models.sources import resolve_source, source_id
from midus.models.weights import Weights
from midus.training.controls import apply_control
from midus.training.freezing import choose_trainable
from midus.training.options import TrainOptions
from midus.upscaling import upscale, upscale_checkpoint
from midus.upscaling.inspect import describe
from midus.upscaling.method import Track
from midus.upscaling.methods import plan_upscaling


@dataclass(frozen=True)
class Start:
    """A model ready to train."""

    model: Any
    trainable: str
    """``inserted``, ``all``, or the name of a control."""
    stored_dtype: torch.dtype
    """Type of the checkpoint it came from, in which the result is written."""
    saves_delta: bool
    """Whether checkpoints hold the inserted tensors only."""
    is_empty: bool = False
    """Whether its weights are still to come, from the first rank."""


def planned_config(options: TrainOptions, base_config: Any = None) -> Any:
    """Config of the model that will train, without reading weights.

    Args:
        options: The run.
        base_config: Config of ``options.model`` where it is known already.
    """
    config = base_config or read_config(resolve_source(options.model, config_only=True))
    if options.upscale is not None:
        _, config = plan_upscaling(config, options.upscale, {})
    return config


def start_model(
    options: TrainOptions, is_empty: bool = False, track: Track = lambda items, _: items
) -> Start:
    """Loads, grows, freezes and casts.

    Args:
        options: Options of the run.
        is_empty: Make the model without weights, for ranks that receive them from the first one.
        track: Wraps loops in a progress bar.
    """
    dtype = torch.float64 if options.precision == "float64" else None
    if is_empty:
        model, stored = _meta_model(options)
    elif options.load_in_4bit:
        model, stored = _quantized_model(options, track)
    else:
        model = load_model(options.model, dtype=dtype, device="cpu")
        stored = model.dtype
        if options.upscale is not None and options.control == "none":
            model = upscale(model, options.upscale, track)
            record_base(model.config, options.model)
    model, trainable = settle_model(model, options)
    if is_empty:
        _materialize(model)
    return Start(
        model,
        trainable,
        stored,
        saves_delta=trainable == "inserted" and (is_empty or _has_its_base(model, options)),
        is_empty=is_empty,
    )


def settle_model(model: Any, options: TrainOptions) -> tuple[Any, str]:
    """Attention, control, freezing and types of a model that is loaded and has grown.

    Args:
        model: The grown model, or the base where a control stands against growing.
        options: Options of the run.

    Returns:
        The model, and what trains: ``inserted``, ``all``, or the name of a control.
    """
    if options.attention is not None:
        _set_attention(model, options.attention)
    if options.control != "none":
        target = target_count(planned_config(options, model.config))
        model, trainable = (
            apply_control(model, options.control, target, options.seed),
            options.control,
        )
    else:
        trainable = choose_trainable(model, options.stage, options.trainable)
    _cast(model, options.precision)
    return model, trainable


def _set_attention(model: Any, name: str) -> None:
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MidusError(f"attention={name!r} cannot be used here ({reason})") from error


def record_base(config: Any, source: str) -> None:
    """What the checkpoints say of the base: the name it was asked for by, not where it lies."""
    folder = resolve_source(source)
    weights = Weights.open_folder(folder)
    base_model = {
        "id": source_id(source),
        # The hub's cache keeps each revision in a folder of its name.
        "revision": folder.name if folder.parent.name == "snapshots" else None,
        "fingerprint": fingerprint(weights, config.tie_word_embeddings),
        "licence": read_licence(folder),
    }
    update_record(config, base_model=base_model)


def _has_its_base(model: Any, options: TrainOptions) -> bool:
    """Whether the frozen weights are the recorded base's, so that a delta loses nothing."""
    if options.upscale is not None or is_delta(read_config(resolve_source(options.model))):
        return True
    return holds_its_base(model)


def _cast(model: Any, precision: str) -> None:
    """Weights that train in the run's type; frozen ones stay as they are stored if ``mixed``."""
    types = {"float32": torch.float32, "float64": torch.float64, "pure_bf16": torch.bfloat16}
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue  # packed 4-bit weights
        if precision in types:
            parameter.data = parameter.data.to(types[precision])
        elif parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif not torch.cuda.is_available():
            parameter.data = parameter.data.float()  # no autocast on a CPU
    if precision in types:
        for buffer in model.buffers():
            # Rotary tables and statistics of norms stay exact.
            if buffer.is_floating_point() and precision == "float64":
                buffer.data = buffer.data.double()


def target_count(config: Any) -> int:
    """Trainable parameters of the up-scaled model that a control stands against."""
    return int(describe(config)["params"]["trainable"])


def _meta_model(options: TrainOptions) -> tuple[Any, torch.dtype]:
    """The same modules with parameters on the meta device; buffers are real."""
    from accelerate import init_empty_weights

    config = planned_config(options)
    if options.upscale is None or options.control != "none":
        config = read_config(resolve_source(options.model, config_only=True))
    stored = _dtype_of(read_config(resolve_source(options.model, config_only=True)))
    with init_empty_weights(include_buffers=False):
        model = causal_lm_class(config)(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(stored)
    return model, stored


def _dtype_of(config: Any) -> torch.dtype:
    dtype = config.dtype or torch.float32
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def _materialize(model: Any) -> None:
    """Memory without contents for parameters on the meta device; pages not touched cost nothing."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = torch.nn.Parameter(
                    torch.empty_like(parameter, device="cpu"), parameter.requires_grad
                )
    model.tie_weights()


def _quantized_model(options: TrainOptions, track: Track) -> tuple[Any, torch.dtype]:
    """The grown model with a base in 4 bits and inserted blocks as they are."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MidusError(
            "load_in_4bit needs the package bitsandbytes; run: pip install bitsandbytes"
        )
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if options.precision in ("float32", "float64"):
        raise MidusError(
            f"load_in_4bit computes in bfloat16, and precision={options.precision!r} does not; "
            "use mixed or pure_bf16"
        )
    with tempfile.TemporaryDirectory(prefix="midus-4bit-") as scratch:
        source: str | Path = options.model
        if options.upscale is not None and options.control == "none":
            source = Path(scratch) / "grown"
            upscale_checkpoint(options.model, source, options.upscale, delta=True, track=track)
        folder = resolve_source(source)
        config = read_config(folder)
        inserted = inserted_linears(inserted_positions(config))
        if options.trainable == "all" or (options.stage == "sft" and options.trainable == "auto"):
            raise MidusError(
                "load_in_4bit keeps the base frozen; set trainable: inserted, or leave it out"
            )
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=[*inserted, "lm_head"],
        )
        loader = causal_lm_class(config) if is_delta(config) else AutoModelForCausalLM
        model = loader.from_pretrained(
            folder, quantization_config=quantization, dtype=torch.bfloat16
        )
        stored = _dtype_of(config)
    # The trainer asks for adapters on a quantized model: the inserted blocks are ours. A delta goes
    # with its base however that is loaded, so its config says nothing of 4 bits.
    model.is_quantized = False
    del model.config.quantization_config
    for module in model.modules():
        # On a CPU an evaluation would repack the weights for a product that has no gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model, stored

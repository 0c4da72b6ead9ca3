"""A plain model of a supported family as one GGUF file, for llama.cpp and what is built on it.

Copied-block methods write ordinary, deeper models of the base's family, so llama.cpp can run them.
Memory blocks it cannot.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.models.configuration import read_config
from midus.models.families import is_upscaled
from midus.models.gguf_tokenizer import add_tokenizer
from midus.models.loading import load_model
from midus.models.sources import resolve_source
from midus.models.weights import fsync

Track = Callable[[Iterable[Any], str], Iterable[Any]]

# llama.cpp's name of a family. Where that is llama, rows of q and k lie in another order.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_TYPE_OF = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


def export_gguf(
    source: str | Path,
    out: str | Path,
    dtype: str | None = None,
    base: str | Path | None = None,
    overwrite: bool = False,
    track: Track = lambda items, _: items,
) -> str:
    """Writes a model without memory blocks, with its tokenizer, as a GGUF file.

    Args:
        source: A folder, hub id or delta of a copied-block method, or a base.
        out: File to write; it appears whole or not at all.
        dtype: ``f32``, ``f16``, ``bf16`` or ``q8_0``; default: the checkpoint's own. Norms are f32.
        base: Where a delta's base is, if not where it says.
        overwrite: Replace ``out`` if it exists.
        track: Shows progress over the tensors.

    Returns:
        The type of the matrices that were written.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MidusError("writing a GGUF file needs the package gguf; run: pip install gguf")
    import gguf

    target, folder = Path(out), resolve_source(source)
    config = read_config(folder)
    _refuse_unsuitable(source, target, config, dtype, overwrite)
    model = load_model(source, base=base, device="cpu")
    dtype = dtype or _TYPE_OF[model.dtype]
    tensors = _named_tensors(model, _rope_factors(model))
    with _whole_file(target) as work:
        writer = gguf.GGUFWriter(work, _ARCHITECTURES[config.model_type])
        _add_architecture(writer, model.config)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
        add_tokenizer(writer, folder, model.config.vocab_size)
        _write(writer, tensors, dtype, track)
    return dtype


def _refuse_unsuitable(
    source: Any, target: Path, config: Any, dtype: str | None, overwrite: bool
) -> None:
    if is_upscaled(config.model_type):
        raise MidusError(
            f"{source} has memory blocks, which llama.cpp cannot run; export a model of a "
            "copied-block method such as llama_pro, or serve this one with transformers or vLLM"
        )
    if config.model_type not in _ARCHITECTURES:
        raise MidusError(
            f"{source} is a {config.model_type} model, and export knows "
            f"{', '.join(_ARCHITECTURES)}; use llama.cpp's own converter"
        )
    if dtype is not None and dtype not in _TYPES:
        raise MidusError(f"type={dtype!r} is unknown; choose one of {', '.join(_TYPES)}")
    if target.suffix != ".gguf":
        raise MidusError(f"{target} does not end in .gguf; give a name such as model.gguf")
    if target.exists() and not overwrite:
        raise MidusError(f"{target} exists; give another name or --overwrite")


@contextmanager
def _whole_file(target: Path) -> Iterator[Path]:
    """A hidden file beside the target that takes its place when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}.{os.getpid()}"
    try:
        yield work
        fsync(work)
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)


def _add_architecture(writer: Any, config: Any) -> None:
    import gguf

    window = getattr(config, "sliding_window", None)
    context = config.max_position_embeddings
    # llama.cpp attends to everything; up to the window's length that is the same.
    writer.add_context_length(min(context, window) if window else context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)


def _rope_factors(model: Any) -> Tensor | None:
    """By what Llama 3.1 divides the angles of plain rotary embeddings; None for other positions."""
    config = model.config
    rope, family = config.rope_parameters, _ARCHITECTURES[config.model_type]
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear") and (kind, family) != ("llama3", "llama"):
        raise MidusError(
            f"rotary positions of type {kind!r} cannot be exported for {config.model_type}; "
            "use llama.cpp's own converter"
        )
    if kind != "llama3":
        return None
    frequencies: Tensor = model.model.rotary_emb.inv_freq.float().cpu()
    steps = torch.arange(len(frequencies), dtype=torch.float32) / len(frequencies)
    plain: Tensor = rope["rope_theta"] ** -steps
    return plain / frequencies


def _named_tensors(model: Any, factors: Tensor | None) -> list[tuple[str, Tensor, int]]:
    """Tensors under llama.cpp's names, and of how many heads the rows change places (0: none)."""
    import gguf

    config = model.config
    arch = _ARCHITECTURES[config.model_type]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = [] if factors is None else [("rope_freqs.weight", factors, 0)]
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise MidusError(f"{name} has no place in llama.cpp's {arch}; use its own converter")
        moved = heads.get(name.split(".")[-2], 0) if arch == "llama" else 0
        tensors.append((theirs, tensor, moved))
    return tensors


def _write(writer: Any, tensors: list[tuple[str, Tensor, int]], dtype: str, track: Track) -> None:
    """One tensor at a time: sizes first, as the format has it, then contents."""
    import gguf
    import numpy as np

    for name, tensor, _ in tensors:
        kind = gguf.GGMLQuantizationType[_type_of(tensor, dtype)]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor_info(
            name, tuple(tensor.shape), None, tensor.numel() // block * size, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor, heads in track(tensors, "writing"):
        kind = gguf.GGMLQuantizationType[_type_of(tensor, dtype)]
        values = _in_pairs(tensor, heads) if heads else tensor
        with np.errstate(over="ignore"):  # told in our own words
            data = gguf.quants.quantize(values.detach().float().contiguous().numpy(), kind)
        if kind.name == "F16" and not torch.from_numpy(data).isfinite().all():
            raise MidusError(f"{name} does not fit into f16; choose bf16 or f32")
        writer.write_tensor_data(data)
    writer.close()


def _type_of(tensor: Tensor, dtype: str) -> str:
    """Norms and biases in f32, what is too narrow for blocks of 32 in f16, as llama.cpp has it."""
    if tensor.dim() < 2:
        return "F32"
    return "F16" if dtype == "q8_0" and tensor.shape[-1] % 32 else _TYPES[dtype]


def _in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows in the order of rotary embeddings that turn neighbours, not halves, of a head."""
    halves: Tensor = weight.unflatten(0, (heads, 2, -1))  # [heads, 2, E / 2, ...]
    return halves.transpose(1, 2).flatten(0, 2)

"""Grows a stored model, file to file, without building it.

A delta reads the anchors' attention only; a full checkpoint copies the base's files one tensor at
a time.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.models.atomic import CONFIG_NAME, atomic_folder, check_space, check_target
from midus.models.card import read_licence
from midus.models.checkpoint import (
    DELTA_NAME,
    base_names,
    open_base,
    split_block_name,
    write_surroundings,
)
from midus.models.configuration import read_config
from midus.models.families import is_upscaled
from midus.models.fingerprint import fingerprint
from midus.models.sources import resolve_source, source_id
from midus.models.weights import INDEX_NAME, Weights, same_tensor, write_copy
from midus.upscaling.methods import plan_upscaling
from midus.upscaling.midus import copied_names, make_block_tensors
from midus.upscaling.plan import StackPlan
from midus.upscaling.proof import prove_identity

Track = Callable[[Iterable[Any], str], Iterable[Any]]

_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "spiece.model",
    "LICENSE*",
    "USE_POLICY*",
    "NOTICE*",
)


@dataclass(frozen=True)
class StoredUpscaling:
    """What was written, and what was shown about it."""

    folder: Path
    config: Any
    plan: StackPlan
    identity_blocks: int
    """Inserted blocks that return their input bit for bit."""
    equal_base_tensors: int | None
    """Base tensors found byte-equal in the new checkpoint; None for a delta, which has none."""
    num_bytes: int


def upscale_checkpoint(
    base: str | Path,
    out: str | Path,
    config: UpscaleConfig | None = None,
    *,
    delta: bool = False,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    hash_all: bool = False,
    track: Track = lambda items, _: items,
) -> StoredUpscaling:
    """Writes the up-scaled checkpoint of a stored base and proves that it computes the same.

    Args:
        base: A folder, hub id, ``.gguf`` file or ``smollm2-135m``.
        out: Folder to write; it appears whole or not at all.
        config: What to insert and where; the paper's settings by default.
        delta: Write the inserted tensors only, with the base's id and fingerprint.
        dtype: Type of the written tensors; default: the base's.
        overwrite: Whether an existing model folder may be replaced.
        hash_all: Take the base's fingerprint from every element instead of a sample.
        track: Wraps loops in a progress bar.
    """
    config = config or UpscaleConfig()
    target = Path(out)
    check_target(target, overwrite)
    folder = resolve_source(base)
    _refuse_same_folder(folder, target)
    base_config = read_config(folder)
    weights = Weights.open_folder(folder)
    plan, new_config = plan_upscaling(base_config, config, {"id": source_id(base)})
    _refuse_unlike_config(weights, base_config, folder)
    dtype = dtype or _main_dtype(weights)
    tied = base_config.tie_word_embeddings
    new_config.base_model = {
        "id": source_id(base),
        "revision": getattr(base_config, "_commit_hash", None),
        "fingerprint": fingerprint(weights, tied, hash_all),
        "license": read_licence(folder),
    }
    new_config.is_delta = delta
    new_config.dtype = str(dtype).split(".")[1]

    inserted: dict[str, Tensor] = {}
    pairs = list(zip(plan.positions, plan.anchors, strict=True))
    for position, anchor in track(pairs, "starting memory blocks"):
        sources = copied_names(new_config, weights, anchor)
        tensors = {name: weights.read(full).to(dtype) for name, full in sources.items()}
        block = make_block_tensors(new_config, position, tensors, config.seed, dtype)
        prefix = _block_prefix(weights)
        inserted.update({f"{prefix}{position}.{name}": value for name, value in block.items()})
    return _write(target, folder, weights, inserted, new_config, plan, dtype, overwrite, track)


def merge_delta(
    delta: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    overwrite: bool = False,
    track: Track = lambda items, _: items,
) -> Path:
    """Writes the full checkpoint that a delta and its base make up.

    Args:
        delta: Folder or hub id of the delta.
        out: Folder to write; it appears whole or not at all.
        base: Where the base is, if not where the delta says.
        overwrite: Whether an existing model folder may be replaced.
        track: Wraps loops in a progress bar.
    """
    target = Path(out)
    check_target(target, overwrite)
    folder = resolve_source(delta)
    _refuse_same_folder(folder, target)
    config = read_config(folder)
    if not is_upscaled(config.model_type) or not config.is_delta:
        raise MidusError(f"{delta} is not a delta checkpoint; only a delta can be merged")
    weights = open_base(config, base)
    tensors = Weights.open_file(folder / DELTA_NAME)
    inserted = {name: tensors.read(name) for name in tensors}
    config.is_delta = False
    dtype = getattr(torch, str(config.dtype).removeprefix("torch."))
    with atomic_folder(target, overwrite) as work:
        check_space(target, weights.num_bytes() + tensors.num_bytes())
        _write_full(work, weights, inserted, config, dtype, track)
        _copy_companions(folder, work)
        write_surroundings(work, config, config.base_model.get("license"))
    return target


def _write(
    target: Path,
    folder: Path,
    weights: Weights,
    inserted: dict[str, Tensor],
    config: Any,
    plan: StackPlan,
    dtype: torch.dtype,
    overwrite: bool,
    track: Track,
) -> StoredUpscaling:
    inserted_bytes = sum(tensor.nbytes for tensor in inserted.values())
    full_bytes = sum(
        _numel(weights[name].shape) * dtype.itemsize for name in base_names(weights, config)
    )
    check_space(target, inserted_bytes + (0 if config.is_delta else full_bytes))
    equal: int | None = None
    with atomic_folder(target, overwrite) as work:
        if config.is_delta:
            _save_tensors(inserted, work / DELTA_NAME)
            written = Weights.open_file(work / DELTA_NAME)
        else:
            _write_full(work, weights, inserted, config, dtype, track)
            written = Weights.open_folder(work)
            equal = _prove_base(weights, written, config, dtype, track)
        inserted.clear()
        _copy_companions(folder, work)
        write_surroundings(work, config, config.base_model.get("license"))
        proven = prove_identity(config, lambda position: _read_block(written, position), track)
        num_bytes = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    return StoredUpscaling(target, config, plan, proven, equal, num_bytes)


def _write_full(
    work: Path,
    weights: Weights,
    inserted: dict[str, Tensor],
    config: Any,
    dtype: torch.dtype,
    track: Track,
) -> None:
    names = base_names(weights, config)
    files = weights.by_file()
    num_files = len(files) + 1
    weight_map: dict[str, str] = {}
    for number, (_, file_names) in enumerate(track(files.items(), "copying the base"), start=1):
        shard = f"model-{number:05}-of-{num_files:05}.safetensors"
        kept = {old: names[old] for old in file_names if old in names}
        write_copy(work / shard, weights, kept, dtype)
        weight_map.update(dict.fromkeys(kept.values(), shard))
    shard = f"model-{num_files:05}-of-{num_files:05}.safetensors"
    _save_tensors(inserted, work / shard)
    weight_map.update(dict.fromkeys(inserted, shard))
    total = sum(path.stat().st_size for path in work.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (work / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _prove_base(
    weights: Weights, written: Weights, config: Any, dtype: torch.dtype, track: Track
) -> int:
    names = base_names(weights, config)
    for old, new in track(names.items(), "comparing base tensors"):
        if new not in written or not same_tensor(weights, old, written, new, dtype):
            raise MidusError(
                f"{new} in the new checkpoint differs from {old} in the base; "
                "the disk may be failing: run again on another one"
            )
    return len(names)


def _read_block(weights: Weights, position: int) -> dict[str, Tensor]:
    tensors = {}
    for name in weights:
        parts = split_block_name(name)
        if parts is not None and parts[1] == position:
            tensors[parts[2]] = weights.read(name)
    return tensors


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _copy_companions(source: Path, work: Path) -> None:
    """Tokenizer, generation settings and licence texts; never code, never the config."""
    for pattern in _COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file() and path.suffix != ".py":
                shutil.copyfile(path, work / path.name)


def _block_prefix(weights: Weights) -> str:
    """What stands before a block's number; checkpoints of a bare decoder lack ``model.``."""
    return next(parts[0] for name in weights if (parts := split_block_name(name)) is not None)


def _main_dtype(weights: Weights) -> torch.dtype:
    """The type most of the base's floating-point elements have."""
    counts: Counter[torch.dtype] = Counter()
    for entry in weights.values():
        if entry.dtype.is_floating_point:
            counts[entry.dtype] += _numel(entry.shape)
    return counts.most_common(1)[0][0]


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _refuse_same_folder(folder: Path, target: Path) -> None:
    if target.exists() and target.samefile(folder):
        raise MidusError(f"{target} is the model that is being read; choose another folder")


def _refuse_unlike_config(weights: Weights, base_config: Any, folder: Path) -> None:
    blocks = {parts[1] for name in weights if (parts := split_block_name(name)) is not None}
    if blocks != set(range(base_config.num_hidden_layers)):
        raise MidusError(
            f"{folder} has weights of {len(blocks)} blocks, but its {CONFIG_NAME} says "
            f"{base_config.num_hidden_layers}; fetch the model again"
        )
    if not any(name.endswith("embed_tokens.weight") for name in weights):
        raise MidusError(f"{folder} has no embedding weights; fetch the model again")

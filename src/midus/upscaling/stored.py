"""Grows a stored model, file to file, without building it.

A delta reads the anchors' attention only; a full checkpoint copies the base's files one tensor at
a time.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.models.atomic import atomic_folder, check_space, check_target, refuse_overlap
from midus.models.card import read_licence
from midus.models.checkpoint import (
    DELTA_NAME,
    base_names,
    block_names,
    copy_companions,
    has_tied_head,
    open_base,
    refuse_foreign_tensors,
    split_block_name,
    write_surroundings,
)
from midus.models.configuration import read_config
from midus.models.delta import base_licence, refuse_unfit_delta
from midus.models.fingerprint import fingerprint, is_base_tensor
from midus.models.fitting import causal_lm_class, refuse_misfit
from midus.models.record import inserted_positions, is_delta, update_record
from midus.models.sources import resolve_source, source_id
from midus.models.weights import (
    INDEX_NAME,
    Weights,
    require_finite,
    require_floats,
    same_tensor,
    write_copy,
)
from midus.upscaling.inspect import count_parameters
from midus.upscaling.method import BaseBlocks, Growth, Track
from midus.upscaling.methods import find_method, plan_upscaling
from midus.upscaling.plan import StackPlan
from midus.upscaling.proof import prove_identity

_SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class StoredUpscaling:
    """What was written, and what was shown about it."""

    folder: Path
    config: Any
    plan: StackPlan
    identity_blocks: int | None
    """Inserted blocks shown to return their input bit for bit; None if the method is not so."""
    equal_base_tensors: int | None
    """Base tensors found equal in the new checkpoint; None for a delta, which has none."""
    is_converted: bool
    """Whether some of them were converted to another type before they were compared."""
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
    # Settle everything the config decides before any weights are fetched.
    base_config = read_config(resolve_source(base, config_only=True))
    plan, new_config = plan_upscaling(base_config, config, {})
    method = find_method(config.method)
    refuse_delta(config, delta)
    folder = resolve_source(base)
    refuse_overlap(target, folder, Path(base))
    weights = Weights.open_folder(folder)
    base_config.tie_word_embeddings = new_config.tie_word_embeddings = has_tied_head(
        weights, base_config
    )
    refuse_misfit({name: entry.shape for name, entry in weights.items()}, base_config, folder)
    dtype = dtype or _main_dtype(weights, folder)
    require_floats(weights, folder)
    base_model = {
        "id": source_id(base),
        # The hub's cache keeps each revision in a folder of its name.
        "revision": folder.name if folder.parent.name == "snapshots" else None,
        "fingerprint": fingerprint(weights, base_config.tie_word_embeddings, hash_all),
        "licence": read_licence(folder),
    }
    update_record(new_config, base_model=base_model, is_delta=delta)
    new_config.dtype = str(dtype).split(".")[1]
    check_space(target, _num_bytes(weights, new_config, dtype))

    growth = Growth(
        BaseBlocks(
            block_names(base_names(weights, new_config), base_config.num_hidden_layers),
            weights.read,
        ),
        plan,
        new_config,
        config,
        dtype,
        track,
    )
    blocks = (
        {f"model.layers.{position}.{name}": tensor for name, tensor in block.items()}
        for position, block in method.make_blocks(growth)
    )
    equal: int | None = None
    is_converted = not delta and any(entry.dtype != dtype for entry in weights.values())
    with atomic_folder(target, overwrite) as work:
        if delta:
            inserted = {name: tensor for block in blocks for name, tensor in block.items()}
            _save_tensors(inserted, work / DELTA_NAME)
            del inserted
            written = Weights.open_file(work / DELTA_NAME)
        else:
            _write_full(work, weights, blocks, new_config, dtype, track)
            written = Weights.open_folder(work)
            equal = _prove_base(weights, written, new_config, dtype, track)
        copy_companions(folder, work)
        write_surroundings(work, new_config, base_licence(new_config), [])
        proven = None
        if method.preserves_function:
            proven = prove_identity(new_config, lambda p: _read_block(written, p), track)
        num_bytes = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    return StoredUpscaling(target, new_config, plan, proven, equal, is_converted, num_bytes)


def refuse_delta(config: UpscaleConfig, delta: bool) -> None:
    """Refuses a delta of a method that trains more than a delta holds."""
    if delta and find_method(config.method).trains != "inserted":
        raise MidusError(
            f"method {config.method!r} trains the base's weights too, which a delta would lose; "
            "write a full checkpoint"
        )


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
    config = read_config(folder)
    if not is_delta(config):
        raise MidusError(f"{delta} is not a delta checkpoint; only a delta can be merged")
    weights = open_base(config, base)
    refuse_overlap(target, folder, *weights.by_file())
    tensors = Weights.open_file(folder / DELTA_NAME)
    shapes = {new: weights[old].shape for old, new in base_names(weights, config).items()}
    shapes |= {name: entry.shape for name, entry in tensors.items()}
    refuse_foreign_tensors(tensors, config)
    refuse_misfit(shapes, config, folder)
    refuse_unfit_delta(
        causal_lm_class(config), config, tensors, base_names(weights, config), weights, folder
    )
    update_record(config, is_delta=False)
    dtype = config.dtype or _main_dtype(weights, folder)
    check_space(target, _num_bytes(weights, config, dtype))
    with atomic_folder(target, overwrite) as work:
        positions = inserted_positions(config)
        blocks = (
            {
                f"model.layers.{p}.{name}": require_finite(t, f"model.layers.{p}.{name}", folder)
                for name, t in _read_block(tensors, p).items()
            }
            for p in positions
        )
        _write_full(work, weights, blocks, config, dtype, track)
        copy_companions(folder, work)
        write_surroundings(work, config, base_licence(config), [])
    return target


def _write_full(
    work: Path,
    weights: Weights,
    blocks: Iterable[dict[str, Tensor]],
    config: Any,
    dtype: torch.dtype,
    track: Track,
) -> None:
    """Writes the base's files under their new names, then the inserted blocks as they come."""
    names = base_names(weights, config)
    parts: list[tuple[Path, list[str]]] = []
    for file_names in track(weights.by_file().values(), "copying the base"):
        kept = {old: names[old] for old in file_names if old in names}
        parts.append((work / f"part-{len(parts)}", list(kept.values())))
        write_copy(parts[-1][0], weights, kept, dtype)
    for tensors in _grouped(blocks):
        parts.append((work / f"part-{len(parts)}", list(tensors)))
        _save_tensors(tensors, parts[-1][0])
    weight_map: dict[str, str] = {}
    total = 0
    for number, (path, tensor_names) in enumerate(parts, start=1):
        shard = f"model-{number:05}-of-{len(parts):05}.safetensors"
        total += path.stat().st_size
        path.rename(work / shard)
        weight_map.update(dict.fromkeys(tensor_names, shard))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (work / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _grouped(blocks: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Blocks put together into shards, so that few are in memory at a time."""
    group: dict[str, Tensor] = {}
    for block in blocks:
        group |= block
        if sum(tensor.nbytes for tensor in group.values()) >= _SHARD_BYTES:
            yield group
            group = {}
    if group:
        yield group


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
        if parts is not None and parts[0] == position:
            tensors[parts[1]] = weights.read(name)
    return tensors


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _num_bytes(weights: Weights, config: Any, dtype: torch.dtype) -> int:
    """What the new checkpoint will take on disk, counted before anything is made."""
    names = {name for name in weights if is_base_tensor(name, config.tie_word_embeddings)}
    base = 0 if is_delta(config) else sum(prod(weights[name].shape) for name in names)
    return (base + count_parameters(config)[1]) * dtype.itemsize


def _main_dtype(weights: Weights, folder: Path) -> torch.dtype:
    """The type most of the base's floating-point elements have."""
    counts: Counter[torch.dtype] = Counter()
    for entry in weights.values():
        if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
            counts[entry.dtype] += prod(entry.shape)
    if not counts:
        raise MidusError(
            f"{folder} has no float32, bfloat16 or float16 tensors; up-scale the unquantized model"
        )
    return counts.most_common(1)[0][0]

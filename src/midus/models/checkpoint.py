"""Full and delta checkpoints: what is in them and how base and inserted tensors come together.

A full checkpoint is an ordinary Hugging Face folder. A delta holds the inserted tensors in
`delta.safetensors`, a name no other loader takes for a whole model, and records the base's id and
fingerprint in its config.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.models.card import auto_map, is_our_card, write_card, write_stub
from midus.models.families import is_upscaled
from midus.models.fingerprint import covers_every_element, fingerprint, is_base_tensor
from midus.models.record import base_of, inserted_positions, write_record
from midus.models.sources import resolve_source
from midus.models.untrusted import refuse_escape, shown
from midus.models.weights import Weights, same_tensor

DELTA_NAME = "delta.safetensors"
# One way to write an index: two names must never mean one tensor.
_BLOCK = re.compile(r"^(?:model\.)?layers\.(0|[1-9][0-9]{0,5})\.(.*)$")
_HEAD = "lm_head.weight"
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


def base_positions(config: Any) -> list[int]:
    """The final index of each base block."""
    inserted = set(inserted_positions(config))
    return [i for i in range(config.num_hidden_layers) if i not in inserted]


def split_block_name(name: str) -> tuple[int, str] | None:
    """``model.layers.3.mlp.up_proj.weight`` -> (3, ``mlp.up_proj.weight``)."""
    match = _BLOCK.match(name)
    return (int(match[1]), match[2]) if match else None


def full_name(name: str) -> str:
    """A tensor's name in the causal LM; checkpoints of a bare decoder lack the ``model.``."""
    return name if name.startswith("model.") or name == _HEAD else f"model.{name}"


def renumber(name: str, positions: list[int]) -> str:
    """A base tensor's name in the up-scaled model, where base block i stands at positions[i]."""
    parts = split_block_name(name)
    if parts is None:
        return full_name(name)
    layer, rest = parts
    if layer >= len(positions):
        raise MidusError(
            f"tensor {shown(name)!r} belongs to block {layer}, but the base's config has "
            f"{len(positions)} blocks; config and weights do not fit together"
        )
    return f"model.layers.{positions[layer]}.{rest}"


def is_inserted(name: str, config: Any) -> bool:
    """Whether a tensor of the up-scaled model belongs to an inserted block."""
    parts = split_block_name(name)
    return parts is not None and parts[0] in inserted_positions(config)


def block_names(names: Iterable[str], num_layers: int) -> list[dict[str, str]]:
    """For each block, the full name of a tensor by its name inside the block."""
    blocks: list[dict[str, str]] = [{} for _ in range(num_layers)]
    for name in names:
        parts = split_block_name(name)
        if parts is not None and parts[0] < num_layers:
            blocks[parts[0]][parts[1]] = name
    return blocks


def base_names(base: Weights, config: Any) -> dict[str, str]:
    """Name in the up-scaled model by name in the base, for every tensor that is taken over."""
    positions = base_positions(config)
    names = {
        name: renumber(name, positions)
        for name in base
        if is_base_tensor(name, config.tie_word_embeddings)
    }
    if len(set(names.values())) != len(names):
        twice = next(name for name in names if full_name(name) != name and full_name(name) in base)
        raise MidusError(
            f"the base holds {shown(twice)!r} and {shown(full_name(twice))!r}, which are one "
            "tensor; fetch it again"
        )
    return names


def has_tied_head(base: Weights, config: Any) -> bool:
    """Whether a base's head is its embedding.

    A checkpoint that says so and stores another head all the same is loaded untied by transformers.
    """
    if not config.tie_word_embeddings or _HEAD not in base:
        return bool(config.tie_word_embeddings)
    names = [name for name in base if full_name(name) == "model.embed_tokens.weight"]
    if not names:
        raise MidusError(
            "the base lacks the tensor 'model.embed_tokens.weight' that its config calls for; "
            "fetch it again"
        )
    embedding = names[0]
    return same_tensor(base, _HEAD, base, embedding, base[_HEAD].dtype)


def open_base(config: Any, base: str | Path | None = None, **download: Any) -> Weights:
    """The base a delta records, or ``base`` instead, checked against the recorded fingerprint."""
    recorded = base_of(config)
    source = base or recorded.get("id")
    if not source:
        raise MidusError("this model does not record its base; give the base explicitly")
    try:
        revision = None if base else recorded.get("revision")
        folder = resolve_source(source, revision, **download)
    except MidusError as error:
        if base:
            raise
        raise MidusError(
            f"the recorded base cannot be used: {error}; or give another base"
        ) from error
    weights = Weights.open_folder(folder)
    expected = recorded.get("fingerprint")
    if expected:
        found = fingerprint(weights, config.tie_word_embeddings, covers_every_element(expected))
        if found != expected:
            raise MidusError(
                f"{source} is not the base of this model: its fingerprint is {found}, the model "
                f"was made from {shown(expected)}; give the base it was made from"
            )
    return weights


def refuse_foreign_tensors(delta: Iterable[str], config: Any) -> None:
    """Refuses a delta that would put something else in place of the base's tensors."""
    for name in delta:
        if not is_inserted(name, config):
            raise MidusError(
                f"{DELTA_NAME} holds {shown(name)!r}, which belongs to the base and not to an "
                "inserted block; fetch the delta again"
            )


def copy_companions(source: Path, folder: Path, unless_in: Path | None = None) -> None:
    """Copies tokenizer, generation settings and licence texts; never code, never the config.

    Args:
        source: Where they are.
        folder: Where to put them.
        unless_in: Folder whose own files of these names are to stay.
    """
    for pattern in _COMPANIONS:
        for path in source.glob(pattern):
            kept = unless_in is not None and (unless_in / path.name).exists()
            if path.is_file() and path.suffix != ".py" and not kept:
                shutil.copyfile(refuse_escape(path), folder / path.name)


def write_surroundings(
    folder: Path,
    config: Any,
    licence: dict[str, str],
    tags: list[str],
    replacing: Path | None = None,
) -> None:
    """Writes card, record and config and, for classes of ours, the stub that loads them.

    Args:
        folder: Where to write.
        config: Config of the model.
        licence: Licence fields of the base.
        tags: Tags of the card besides ours.
        replacing: Folder whose own card, if it is not ours, is kept.
    """
    if is_upscaled(config.model_type):
        config.auto_map = auto_map(config)
        causal_lm = config.auto_map["AutoModelForCausalLM"].split(".")[1]
        config.architectures = config.architectures or [causal_lm]  # servers go by it
        write_stub(folder, config)
    if replacing is None or is_our_card(replacing / "README.md"):
        write_card(folder, config, licence, tags)
    write_record(folder, config)
    config.save_pretrained(folder)

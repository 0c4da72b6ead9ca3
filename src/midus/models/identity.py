"""What a stored model is, byte for byte: results on disk are kept under this name."""

import hashlib
from pathlib import Path

from midus.models.atomic import CONFIG_NAME
from midus.models.configuration import read_config
from midus.models.record import base_of
from midus.models.sources import resolve_source

# Besides the weights, whatever can change what a model reads or writes.
_SMALL_FILES = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def model_id(source: str | Path) -> str:
    """A SHA-256 of a model's weights, configs and tokenizer, twelve digits of it.

    A delta's id covers the fingerprint of the base it was made from.

    Args:
        source: A folder, hub id, ``.gguf`` file or ``smollm2-135m``.
    """
    folder = resolve_source(source)
    digest = hashlib.sha256()
    small = [folder / name for name in _SMALL_FILES if (folder / name).is_file()]
    for path in (*small, *sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(f"\n{path.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    digest.update(str(base_of(read_config(folder)).get("fingerprint")).encode())
    return digest.hexdigest()[:12]

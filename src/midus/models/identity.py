"""What a stored model is, byte for byte: results on disk are kept under this name."""

import hashlib
from pathlib import Path

from midus.models.atomic import CONFIG_NAME
from midus.models.configuration import read_config
from midus.models.record import base_of
from midus.models.sources import resolve_source


def model_id(source: str | Path) -> str:
    """A SHA-256 of a model's weights and config, twelve digits of it.

    A delta's id covers the fingerprint of the base it was made from.

    Args:
        source: A folder, hub id, ``.gguf`` file or ``smollm2-135m``.
    """
    folder = resolve_source(source)
    digest = hashlib.sha256((folder / CONFIG_NAME).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"\n{path.name} ".encode() + hashlib.file_digest(file, "sha256").digest())
    digest.update(str(base_of(read_config(folder)).get("fingerprint")).encode())
    return digest.hexdigest()[:12]

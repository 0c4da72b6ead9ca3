"""Deltas as servers want them: merged with their base on first use, kept in the cache folder.

The copy's name holds a SHA-256 of the delta, its tokenizer and its base's fingerprint, so a delta
that has changed is merged anew. A copy can be deleted at any time; the next use makes it again.
"""

from dataclasses import dataclass
from pathlib import Path

from midus.errors import MidusError
from midus.models.atomic import CONFIG_NAME, recover
from midus.models.checkpoint import open_base
from midus.models.configuration import read_config
from midus.models.identity import model_id
from midus.models.record import base_of, is_delta
from midus.models.sources import cache_folder, resolve_source
from midus.models.weights import Weights
from midus.upscaling import merge_delta
from midus.upscaling.method import Track


@dataclass(frozen=True)
class Served:
    """A folder that holds a whole model."""

    folder: Path
    is_delta: bool
    """Whether it was made from a delta."""
    is_reused: bool = False
    """Whether an earlier use made it."""


def whole_model(
    source: str | Path, base: str | Path | None = None, track: Track = lambda items, _: items
) -> Served:
    """The folder of a whole model: a full checkpoint's own, a delta's merged copy.

    Args:
        source: A folder, hub id, ``.gguf`` file or ``smollm2-135m``; full or delta.
        base: For a delta: where its base is, if not where it says.
        track: Wraps loops in a progress bar.
    """
    folder = resolve_source(source)
    config = read_config(folder)
    if not is_delta(config):
        if base:
            raise MidusError(
                f"base={str(base)!r} was given, but {source} is no delta; leave it out"
            )
        Weights.open_folder(folder)  # refuses one without weights
        return Served(folder, is_delta=False)
    if not base_of(config).get("fingerprint"):
        raise MidusError(
            f"{source} does not record its base's fingerprint, so a merged copy could be another "
            "model's; make a full checkpoint with midus merge"
        )
    target = cache_folder() / "merged" / f"{folder.resolve().name}-{model_id(folder)}"
    recover(target)
    if (target / CONFIG_NAME).is_file():
        if base:
            open_base(config, base)  # refuses one the delta was not made from
        return Served(target, is_delta=True, is_reused=True)
    # Two processes may merge at once: both write the same bytes, and the last one wins.
    merge_delta(folder, target, base=base, overwrite=True, track=track)
    return Served(target, is_delta=True)

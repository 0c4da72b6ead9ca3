"""What a checkpoint of unknown origin may say.

Files stay in its folder, JSON is of a sane size, sizes can be, texts fit in one line of a message.
Nothing here opens a pickle, runs code or allocates what a file merely claims. `docs/security.md`
says what is promised; `tests/models/test_hostile_checkpoints.py` tries to break it.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from midus.errors import MidusError

_MAX_JSON = 64 << 20  # the largest weight indices and configs take a few megabytes
_SHOWN = 200

# Far beyond any model, and small enough that building one without weights takes a moment.
MAX_BLOCKS = 1024
_MAX_SIZE = 2**31 - 1
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")

# Fields of a config by which transformers reads other files than the ones checked here.
_REDIRECTIONS = ("transformers_weights", "configuration_files")
_ATTENTION_FIELDS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def shown(value: Any, length: int = _SHOWN) -> str:
    """Text of unknown origin for a message: one line, no control characters, not too long."""
    text = str(value)
    cut = text[:length] + "…" if len(text) > length else text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def reason_of(error: BaseException) -> str:
    """What another library says about a file, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return shown(lines[-1].strip() or type(error).__name__)


def has_control(text: str) -> bool:
    """Whether a text has line breaks, terminal codes or the like in it."""
    return _CONTROL.search(text) is not None


def refuse_escape(path: Path) -> Path:
    """Refuses a file whose link leads out of its folder; returns the path.

    The hub's cache keeps files as links into the folder ``blobs`` beside its snapshots; those may.
    """
    if not path.is_symlink():
        return path
    folder = Path(os.path.realpath(path.parent))
    target = Path(os.path.realpath(path))
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(place in target.parents for place in allowed):
        raise MidusError(
            f"{path} is a link to {shown(target)}, outside the checkpoint; "
            "put the file itself there"
        )
    return path


def read_json(path: Path) -> Any:
    """The contents of a JSON file; ``ValueError`` or ``OSError`` for what is none."""
    refuse_escape(path)
    if not path.is_file():
        raise ValueError("it is not a file")
    size = path.stat().st_size
    if size > _MAX_JSON:
        raise ValueError(f"it has {size:,} bytes, more than {_MAX_JSON:,}")
    return parse_json(path.read_bytes())


def parse_json(text: bytes) -> Any:
    """JSON as the standard has it: each key once, no NaN; ``ValueError`` for anything else."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        if b"\\u" in text:
            # JSON can write halves of characters, which no file, digest or terminal takes.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeError as error:
        raise ValueError("it has text that is not UTF-8") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {shown(twice)!r} twice")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it has the number {name}")


def is_whole(value: Any, smallest: int, largest: int) -> bool:
    """Whether a value is a whole number in a range; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest


def refuse_odd_sizes(config: Any, source: Path) -> None:
    """Refuses a config whose sizes no model has, before anything is made of that size."""
    if not is_whole(config.num_hidden_layers, 1, MAX_BLOCKS):
        raise MidusError(
            f"{source} has num_hidden_layers={_repr(config.num_hidden_layers)}, which must be a "
            f"whole number from 1 to {MAX_BLOCKS:,}; fetch the checkpoint again"
        )
    for name in _SIZES:
        value = getattr(config, name, None)
        if value is None and name in _OPTIONAL:
            continue
        if not is_whole(value, 1, _MAX_SIZE):
            raise MidusError(
                f"{source} has {name}={_repr(value)}, which must be a whole number from 1 to "
                f"{_MAX_SIZE:,}; fetch the checkpoint again"
            )

    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if shared is not None and heads % shared:
        raise MidusError(
            f"{source} has num_attention_heads={heads}, which must be a multiple of "
            f"num_key_value_heads={shared}; fetch the checkpoint again"
        )


def refuse_redirections(values: dict[str, Any], source: Path) -> None:
    """Refuses fields that make a loader read other files, or fetch kernels from the hub."""
    for name in _REDIRECTIONS:
        if values.get(name) is not None:
            raise MidusError(
                f"{source} has {name}={_repr(values[name])}, which points a loader to other files; "
                "remove it and give the folder of those files"
            )
    for name in _ATTENTION_FIELDS:
        value = values.get(name)
        if value is not None and not (isinstance(value, str) and re.fullmatch(r"\w+", value)):
            raise MidusError(
                f"{source} has {name}={_repr(value)}, which can fetch code from the hub; remove it"
            )


def check_positions(positions: Any, num_blocks: Any) -> None:
    """Refuses indices of inserted blocks that are not ascending ones of the final stack."""
    if not isinstance(positions, list):
        raise MidusError(
            f"memory_positions={_repr(positions)} in the config must be a list; "
            "fetch the checkpoint again"
        )
    last = -1
    for position in positions:
        if not is_whole(position, last + 1, num_blocks - 1):
            raise MidusError(
                f"memory_positions={_repr(positions)} must be ascending indices of a stack of "
                f"{num_blocks} blocks; fetch the checkpoint again"
            )
        last = position


def check_making(values: dict[str, Any]) -> None:
    """Refuses a record of how blocks were placed that is not made of plain, one-line texts."""
    for name in ("method", "placement"):
        value = values.get(name)
        if value is not None and (not isinstance(value, str) or has_control(value)):
            raise MidusError(
                f"{name}={_repr(value)} in the config must be a text of one line; "
                "fetch the checkpoint again"
            )
    seed = values.get("seed")
    if seed is not None and not is_whole(seed, 0, 2**64):
        raise MidusError(
            f"seed={_repr(seed)} in the config must be a whole number; fetch the checkpoint again"
        )


def check_base_model(base_model: Any) -> None:
    """Refuses a record of the base that is not made of plain, one-line texts."""
    if base_model is None:
        return
    if not isinstance(base_model, dict):
        raise MidusError(
            f"base_model={_repr(base_model)} in the config must be a dict; "
            "fetch the checkpoint again"
        )
    for name in ("id", "revision", "fingerprint"):
        value = base_model.get(name)
        if value is not None and (not isinstance(value, str) or has_control(value)):
            raise MidusError(
                f"base_model[{name!r}]={_repr(value)} must be a text of one line; "
                "fetch the checkpoint again"
            )
    licence = base_model.get("licence") or {}
    if not isinstance(licence, dict) or not all(
        isinstance(text, str) and not has_control(text) for pair in licence.items() for text in pair
    ):
        raise MidusError(
            f"base_model['licence']={_repr(licence)} must hold texts of one line; "
            "fetch the checkpoint again"
        )


def _repr(value: Any) -> str:
    # A number of 4,301 digits or more has no text, and no list needs all of its own.
    if isinstance(value, list) and len(value) > 16:
        value = [*value[:16], ...]
    try:
        return shown(repr(value))
    except ValueError:
        return "(a number too long to show)"

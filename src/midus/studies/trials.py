"""One training of a study: its full options, and a key that is theirs alone."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from midus.training.options import TrainOptions

UNTOUCHED = "untouched"
# Where things lie, and how steps are launched, change nothing; what lies there is in the key by its
# contents.
_PLACES = ("model", "output", "data", "cuda_graphs")
# Options that came after trials had been run: while they are as here, keys are as before.
_LATER = {
    "relative_lr": None,
    "by_stream": False,
    "matrices": "adamw",
    "decay_ratio": None,
    "for_steps": None,
    "steps_power": None,
}


@dataclass(frozen=True)
class Trial:
    """One training of a study."""

    method: str
    varied: dict[str, Any]
    """The settings that were searched, by option."""
    seed: int
    options: TrainOptions
    """Everything, as `midus train` would take it."""
    is_final: bool = False
    """Whether it is what its method comes to, and is measured on tasks."""
    keep: bool = False
    """Whether its model is kept."""

    @property
    def setting(self) -> str:
        """The searched settings in one line, the same for every seed."""
        return say_setting(self.varied)

    @property
    def tokens(self) -> int:
        """Tokens it reads: whole steps."""
        options = self.options
        return int(options.trainer["max_steps"]) * options.batch_size * options.data.seq_len

    def key(self, identity: str) -> str:
        """See `trial_key`."""
        return trial_key(self.options, identity)


def trial_key(options: TrainOptions, identity: str) -> str:
    """A hash of all that decides a trial's result.

    Args:
        options: Every option, resolved.
        identity: What base, tokens and texts are, wherever they lie.
    """
    facts = {name: value for name, value in options.to_dict().items() if name not in _PLACES}
    facts = _without_later(facts)
    facts |= {"seq_len": options.data.seq_len, "max_tokens": options.data.max_tokens}
    return hash_facts({"options": facts, "identity": identity})


def _without_later(facts: Any) -> Any:
    """Without later options that are not given."""
    if not isinstance(facts, dict):
        return facts
    kept = {name: _without_later(value) for name, value in facts.items()}
    return {name: value for name, value in kept.items() if (name, value) not in _LATER.items()}


def base_key(options: TrainOptions, identity: str) -> str:
    """The key of the base as it came, read as the trials of these options are."""
    facts = {
        "seq_len": options.data.seq_len,
        "precision": options.precision,
        "attention": options.attention,
        "identity": identity,
    }
    return f"{UNTOUCHED}-{hash_facts(facts)}"


def hash_facts(facts: dict[str, Any]) -> str:
    """Sixteen digits that stand for all of it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def say_setting(varied: dict[str, Any]) -> str:
    """Options and their values in one line."""
    return ", ".join(f"{_short(name)}={_said(value)}" for name, value in varied.items())


def _short(name: str) -> str:
    """The last word of an option, with the part where it is one of several."""
    *path, last = name.split(".")
    return f"{path[-1]}.{last}" if len(path) > 1 and path[-2] == "parts" else last


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""The one exception a user is meant to read."""

import difflib
from collections.abc import Iterable

_LISTED = 12


class MidusError(ValueError):
    """Something the user gave cannot be used.

    The message is one sentence that names the value, what was expected and what to do. The
    command line prints it without a traceback and exits with code 2.
    """


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: what is near it, or what there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 3, 0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    listed = ", ".join(names[:_LISTED])
    return f"choose from {listed}{', …' if len(names) > _LISTED else ''}"

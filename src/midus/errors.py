"""The one exception a user is meant to read."""


class MidusError(ValueError):
    """Something the user gave cannot be used.

    The message is one sentence that names the value, what was expected and what to do. The
    command line prints it without a traceback and exits with code 2.
    """

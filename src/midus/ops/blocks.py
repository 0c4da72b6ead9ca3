"""Block sizes of the Triton kernels: plain arithmetic on shapes, no device is asked."""

# Programs that share a sum over tokens: enough to keep a large GPU busy, and more where each still
# has many tokens, so that the last ones to finish cost little.
_PROGRAMS, _PROGRAMS_LONG, _LONG = 256, 1024, 8192


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up; ``triton.cdiv`` is slower outside of kernels."""
    return -(-a // b)


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least``."""
    return max(1 << max(size - 1, 0).bit_length(), least)


def num_splits(num_tokens: int, tiles: int, block_tokens: int) -> int:
    """Into how many parts to cut a sum over tokens that ``tiles`` programs share.

    Depends on shapes alone, so that a sum has one order everywhere.
    """
    programs = _PROGRAMS if num_tokens < _LONG else _PROGRAMS_LONG
    return max(1, min(programs // tiles, ceil_div(num_tokens, 2 * block_tokens)))

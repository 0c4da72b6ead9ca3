"""Random instances of the fixed-retrieval setup, with retrieval as sparse as the real one."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from midus.analysis.fixed_retrieval import Retrieval

FEWER_TOKENS, MORE_TOKENS, REPEATED_TOKENS = range(3)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one instance."""

    num_heads: int
    num_tokens: int
    num_slots: int
    top_k: int
    head_width: int
    """Width of a head's correction (paper: d_h)."""
    rank: int
    """Width of the latent table (paper: r), at most ``head_width``."""


def draw_sizes(regime: int, generator: Generator) -> Sizes:
    """Small sizes with fewer tokens than slots, with more, or with tokens that repeat."""

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_slots, head_width = between(8, 24), between(2, 8)
    num_tokens = {
        FEWER_TOKENS: between(2, num_slots // 2),
        MORE_TOKENS: between(2 * num_slots, 4 * num_slots),
        REPEATED_TOKENS: between(num_slots // 2, num_slots),
    }[regime]
    return Sizes(
        num_heads=between(2, 6),
        num_tokens=num_tokens,
        num_slots=num_slots,
        top_k=between(1, 4),
        head_width=head_width,
        rank=between(1, head_width),
    )


def draw_matrix(sizes: Sizes, generator: Generator) -> Tensor:
    """A_h: each row holds the softmax of the ``top_k`` largest of random scores, ``[H, T, N]``."""
    shape = (sizes.num_heads, sizes.num_tokens, sizes.num_slots)
    scores = torch.randn(shape, generator=generator, dtype=torch.float64)
    best, slot_idx = scores.topk(sizes.top_k)  # [H, T, K]
    return torch.zeros_like(scores).scatter(-1, slot_idx, best.softmax(-1))


def repeat_tokens(matrix: Tensor) -> Tensor:
    """The later half of the tokens retrieves what the earlier half did: a deficient rank."""
    num_distinct = -(-matrix.shape[1] // 2)
    return matrix[:, torch.arange(matrix.shape[1]) % num_distinct]


def draw_retrieval(sizes: Sizes, regime: int, generator: Generator) -> Retrieval:
    """A_h of one instance."""
    matrix = draw_matrix(sizes, generator)
    return Retrieval.of(repeat_tokens(matrix) if regime == REPEATED_TOKENS else matrix)


def draw_normal(*shape: int, generator: Generator) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def targets_with_banks(retrieval: Retrieval, banks: Tensor, outside: Tensor) -> Tensor:
    """Targets whose best banks are given: ``A_h V_h`` and what no bank can express of ``outside``.

    Args:
        retrieval: A_h.
        banks: V_h, ``[H, N, O]``, or one bank for all.
        outside: ``[H, T, O]``; only its part orthogonal to A_h's columns is used.
    """
    return retrieval.matrix @ banks + outside - retrieval.project(outside)

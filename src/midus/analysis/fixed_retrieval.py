"""The paper's theory of fixed retrieval, formula by formula: Propositions 1 and 2, Theorem 1.

Paper, Section 4.3 and Appendix "Structural Analysis of Head-wise Value Memory". With the retrieval
weights A_h fixed, a head's correction ``F_h = A_h V_h`` is linear in its values, and every best
loss is a least-squares problem. Three families of values are compared on targets Y_h:

- shared: one realized bank, ``V_h = V_sh``;
- head-wise: a bank for each head;
- HIVE: one latent table seen through a projection of each head, ``V_h = Vbar W_h``.

Everything is in float64. Shape letters: H heads, T tokens, N slots, O width of a head's correction
(paper: d_h), R latent, S singular values of an A_h.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RANK_TOLERANCE = 1e-6
"""A singular value below this part of the largest counts as zero.

The square root of what float64 can tell apart in ``A^T A``, with a margin. Weights that a model
computed in float32 are known no better.
"""


@dataclass(frozen=True)
class Retrieval:
    """A_h of every head and its singular value decomposition, A_h = U S V^T."""

    matrix: Tensor
    """A_h, ``[H, T, N]``."""
    left: Tensor
    """U, ``[H, T, S]``; columns without a singular value are zero."""
    singular: Tensor
    """``[H, S]``, descending; zero beyond the rank."""
    right: Tensor
    """V^T, ``[H, S, N]``."""

    @classmethod
    def of(cls, matrix: Tensor) -> "Retrieval":
        """Decomposes A_h; singular values that count as zero are removed from it.

        Args:
            matrix: ``[H, T, N]``.
        """
        left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        kept = singular > RANK_TOLERANCE * singular[:, :1]
        left, singular = left * kept.unsqueeze(-2), singular * kept
        return cls(left * singular.unsqueeze(-2) @ right, left, singular, right)

    def of_head(self, head: int) -> "Retrieval":
        """One head's A for all heads, as Theorem 1 has it."""
        own = (self.matrix, self.left, self.singular, self.right)
        return Retrieval(*(tensor[head].expand_as(tensor) for tensor in own))

    @property
    def ranks(self) -> list[int]:
        return (self.singular > 0).sum(-1).tolist()

    def project(self, target: Tensor) -> Tensor:
        """``Pi_{A_h} Y_h``, onto what A_h can express at all: ``[H, T, O]``."""
        return self.left @ (self.left.mT @ target)

    def fit(self, target: Tensor) -> Tensor:
        """``A_h^+ Y_h``, the bank of least norm among the best: ``[H, N, O]``."""
        inverse = torch.where(self.singular > 0, 1 / self.singular, 0)
        return self.right.mT @ (inverse.unsqueeze(-1) * (self.left.mT @ target))


def correction_loss(correction: Tensor, target: Tensor) -> Tensor:
    """``L(F) = 1/2 sum_h ||F_h - Y_h||^2``."""
    return 0.5 * (correction - target).square().sum()


def headwise_loss(retrieval: Retrieval, target: Tensor) -> Tensor:
    """``L*_Ind = 1/2 sum_h ||(I - Pi_{A_h}) Y_h||^2``, the best of a bank for each head."""
    return correction_loss(retrieval.project(target), target)


def shared_bank(retrieval: Retrieval, target: Tensor) -> Tensor:
    """``V*_sh = (sum_h A_h^T A_h)^+ sum_h A_h^T Y_h``, Proposition 1: ``[N, O]``."""
    rows = retrieval.matrix.flatten(0, 1)  # all heads' rows, so that no sum needs [H, N, N]
    gram = rows.mT @ rows
    inverse: Tensor = torch.linalg.pinv(gram, rtol=RANK_TOLERANCE**2, hermitian=True)
    return inverse @ (rows.mT @ target.flatten(0, 1))


def solve_shared(retrieval: Retrieval, target: Tensor) -> Tensor:
    """V*_sh by least squares on all heads' rows stacked, without Proposition 1: ``[N, O]``."""
    rows, wanted = retrieval.matrix.flatten(0, 1), target.flatten(0, 1)
    # gelsd, unlike the default, takes matrices of any rank.
    found = torch.linalg.lstsq(rows, wanted, rcond=RANK_TOLERANCE, driver="gelsd")
    bank: Tensor = found.solution
    return bank


def shared_loss(retrieval: Retrieval, target: Tensor) -> Tensor:
    """``L*_Share``, the best of one realized bank, found by least squares."""
    return correction_loss(retrieval.matrix @ solve_shared(retrieval, target), target)


def sharing_gap(retrieval: Retrieval, target: Tensor) -> Tensor:
    """``Delta_Share = 1/2 sum_h ||A_h V*_sh - Pi_{A_h} Y_h||^2``, Proposition 1."""
    correction = retrieval.matrix @ shared_bank(retrieval, target)
    return correction_loss(correction, retrieval.project(target))


def common_retrieval_gap(retrieval: Retrieval, target: Tensor) -> Tensor:
    """``Delta_Share = 1/2 sum_h ||Pi_A (Y_h - Ybar)||^2``, where A_h = A for all heads."""
    return 0.5 * retrieval.project(target - target.mean(0)).square().sum()


def factorize(banks: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The Vbar and W_h of that rank with the least ``sum_h ||V_h - Vbar W_h||^2``.

    A truncated singular value decomposition of ``[V_1 | ... | V_H]``.

    Args:
        banks: V_h, ``[H, N, O]``.
        rank: Width r of the latent table.

    Returns:
        Vbar ``[N, R]`` and W_h ``[H, R, O]``.
    """
    num_heads, _, width = banks.shape
    side_by_side = banks.movedim(0, 1).flatten(1)  # [N, H * O]
    left, singular, right = torch.linalg.svd(side_by_side, full_matrices=False)
    latent_values = left[:, :rank] * singular[:rank]
    value_proj = right[:rank].unflatten(1, (num_heads, width)).movedim(1, 0)
    return latent_values, value_proj


def hive_loss(
    retrieval: Retrieval, target: Tensor, latent_values: Tensor, value_proj: Tensor
) -> Tensor:
    """The loss of HIVE's correction ``A_h Vbar W_h``."""
    return correction_loss(retrieval.matrix @ latent_values @ value_proj, target)


def hive_bound(
    retrieval: Retrieval, target: Tensor, latent_values: Tensor, value_proj: Tensor
) -> Tensor:
    """``L*_Ind + rho / 2 * eps``, which HIVE's loss does not exceed: Proposition 2.

    With ``rho = max_h ||A_h||_op^2``, ``eps = sum_h ||R_h||^2`` and ``R_h = V*_h - Vbar W_h`` for
    the V*_h of least norm. The proof nowhere needs the r <= d_h of the statement.
    """
    remainder = retrieval.fit(target) - latent_values @ value_proj
    rho = retrieval.singular.square().max()
    return headwise_loss(retrieval, target) + 0.5 * rho * remainder.square().sum()


def best_factors(retrieval: Retrieval, target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best Vbar and W_h of that rank, where A_h = A for all heads.

    HIVE's corrections are then the matrices ``[F_1 | ... | F_H]`` of that rank with columns in A's
    span, and the nearest one to the targets is the truncated ``Pi_A [Y_1 | ... | Y_H]``.
    """
    expressed, value_proj = factorize(retrieval.project(target), rank)
    return retrieval.fit(expressed.unsqueeze(0))[0], value_proj


def best_hive_losses(retrieval: Retrieval, target: Tensor) -> Tensor:
    """HIVE's best loss at every rank from 0 to that of the targets, where A_h = A.

    ``L*_Ind + 1/2 sum_{i > r} sigma_i^2`` with the singular values of ``Pi_A [Y_1 | ... | Y_H]``.
    """
    side_by_side = retrieval.project(target).movedim(0, 1).flatten(1)  # [T, H * O]
    energy = torch.linalg.svdvals(side_by_side).square()
    beyond = torch.cat([energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)])
    return headwise_loss(retrieval, target) + 0.5 * beyond

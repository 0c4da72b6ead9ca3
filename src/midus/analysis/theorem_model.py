"""The propositions and the theorem on a real model's retrieval.

Propositions 1 and 2 are checked with the model's own A_h. Theorem 1 does not apply to those: it
asks for one A for all heads. It is checked with one head's A for all of them, on targets cut to a
factorization of rank r, as its hypothesis has it; the rank curve tells how well HIVE does on the
targets as they are.

Losses are shares of the loss of no correction at all.
"""

from typing import Any

import torch

from midus.analysis.fixed_retrieval import (
    Retrieval,
    best_factors,
    correction_loss,
    factorize,
    headwise_loss,
    hive_loss,
    shared_bank,
)
from midus.analysis.random_retrieval import targets_with_banks
from midus.analysis.retrieval_matrices import BlockRetrieval
from midus.analysis.theorem_checks import (
    Findings,
    check_best_hive,
    check_common_retrieval,
    check_proposition_1,
    check_proposition_2,
    check_theorem_1,
)
from midus.analysis.theorem_curves import RankCurve, rank_curve
from midus.errors import MidusError


def check_model(collected: BlockRetrieval, head: int = 0) -> tuple[Findings, dict[str, Any]]:
    """Every statement on one memory block.

    Args:
        collected: What the block retrieves and should write.
        head: Whose A stands for all heads where the theorem asks for one.
    """
    num_heads, num_tokens, head_width = collected.target.shape
    if num_heads < 2:
        raise MidusError("this model has one head, and the theorem compares heads; give another")
    found = Findings()
    own = Retrieval.of(collected.matrix)
    values: dict[str, Any] = {
        "block": collected.block,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "head_width": head_width,
        "latent_dim": collected.latent_dim,
        **_slots_read(collected.matrix),
        "ranks": own.ranks,
        "own_retrieval": _check_own(own, collected, found),
        "common_retrieval": _check_common(own.of_head(head), collected, found),
    }
    values["common_retrieval"]["head"] = head
    return found, {
        "max_equality_error": found.max_equality_error,
        "max_bound_violation": found.max_bound_violation,
        "min_strict_gap": found.min_strict_gap,
        **values,
    }


def _slots_read(matrix: torch.Tensor) -> dict[str, int]:
    readers = (matrix != 0).any(1).sum(0)  # heads that read each slot
    return {
        "slots_read": int((readers > 0).sum()),
        "slots_read_by_several": int((readers > 1).sum()),
    }


def _check_own(own: Retrieval, collected: BlockRetrieval, found: Findings) -> dict[str, Any]:
    """Propositions 1 and 2 with the A_h as they are."""
    target = collected.target
    nothing = 0.5 * target.square().sum()
    check_proposition_1(own, target, found)
    table = shared_bank(own, target)
    shared = correction_loss(own.matrix @ table, target)
    banks = own.fit(target)
    hive = []
    for rank in sorted({target.shape[-1], collected.latent_dim or target.shape[-1]}):
        loss, bound = check_proposition_2(own, target, *factorize(banks, rank), found)
        hive.append({"rank": rank, "loss": loss / float(nothing), "bound": bound / float(nothing)})
    alone = headwise_loss(own, target)
    return {
        "headwise_loss": float(alone / nothing),
        "shared_loss": float(shared / nothing),
        "gap": float((shared - alone) / shared),
        "refitted_loss": float(_refitted_loss(own, target, table) / nothing),
        "truncated": hive,
    }


def _refitted_loss(own: Retrieval, target: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """HIVE with the best shared bank as its table and each head's best W_h for it.

    HIVE's best loss at r = d_h is at most this, which is at most that of the shared bank (W_h = I).
    """
    read = Retrieval.of(own.matrix @ table)
    return hive_loss(own, target, table, read.fit(target))


def _check_common(same: Retrieval, collected: BlockRetrieval, found: Findings) -> dict[str, Any]:
    """Theorem 1, and the rest of Proposition 1, with one A for all heads."""
    target = collected.target
    width = target.shape[-1]
    rank = min(width, collected.latent_dim or width)
    check_common_retrieval(same, target, found)
    check_best_hive(same, target, rank, found)
    latent_values, value_proj = best_factors(same, target, rank)
    cut = targets_with_banks(same, latent_values @ value_proj, target)
    curve = rank_curve(same, target)
    return {
        "gap": (curve.shared_loss - curve.headwise_loss) / curve.shared_loss,
        "theorem": {"rank": rank, "gap": check_theorem_1(same, cut, rank, found)},
        "ranks_needed": _ranks_needed(curve),
        "rank_curve": curve.to_dict(),
    }


def _ranks_needed(curve: RankCurve) -> dict[str, int]:
    """Smallest ranks at which HIVE beats sharing and closes most of the way to head-wise banks."""

    def first_below(loss: float) -> int:
        reached = zip(curve.rank, curve.hive_loss, strict=True)
        return next((rank for rank, best in reached if best <= loss), curve.rank[-1])

    way = curve.hive_loss[0] - curve.hive_loss[-1]
    return {
        "below_shared": first_below(curve.shared_loss),
        "90_percent": first_below(curve.hive_loss[-1] + 0.1 * way),
        "99_percent": first_below(curve.hive_loss[-1] + 0.01 * way),
    }

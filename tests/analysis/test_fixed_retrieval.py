"""The theory of fixed retrieval against numbers computed on paper, numpy, and plain descent."""

import math

import numpy as np
import pytest
import torch
from tiny import TOLERANCE
from torch.utils._python_dispatch import TorchDispatchMode

from midus.analysis import theorem_checks
from midus.analysis.fixed_retrieval import (
    RANK_TOLERANCE,
    Retrieval,
    best_factors,
    best_hive_losses,
    common_retrieval_gap,
    correction_loss,
    factorize,
    headwise_loss,
    hive_bound,
    hive_loss,
    shared_bank,
    shared_loss,
    sharing_gap,
    solve_shared,
)
from midus.analysis.random_retrieval import (
    FEWER_TOKENS,
    MORE_TOKENS,
    REPEATED_TOKENS,
    draw_matrix,
    draw_normal,
    draw_retrieval,
    draw_sizes,
    targets_with_banks,
)
from midus.analysis.theorem_checks import Findings, check_random_instances
from midus.analysis.theorem_curves import heterogeneity_curve, random_rank_curves
from midus.errors import MidusError

EXACT = {"rel": TOLERANCE[torch.float64], "abs": 1e-12}
REGIMES = [FEWER_TOKENS, MORE_TOKENS, REPEATED_TOKENS]
every_regime = pytest.mark.parametrize("regime", REGIMES, ids=["fewer", "more", "repeated"])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def one_slot():
    """Two heads, two tokens, one slot: every weight is 1, so a bank is the one number it writes."""
    retrieval = Retrieval.of(tensor([[[1], [1]], [[1], [1]]]))
    target = tensor([[[1], [3]], [[5], [7]]])
    return retrieval, target


@pytest.fixture
def two_slots():
    """Head 0 reads slot 0, then slot 1; head 1 reads slot 0 twice."""
    retrieval = Retrieval.of(tensor([[[1, 0], [0, 1]], [[1, 0], [1, 0]]]))
    target = tensor([[[2], [4]], [[0], [6]]])
    return retrieval, target


def draw(regime, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = draw_sizes(regime, generator)
    retrieval = draw_retrieval(sizes, regime, generator)
    shape = (sizes.num_heads, sizes.num_tokens, sizes.head_width)
    return retrieval, draw_normal(*shape, generator=generator), generator


class TestByHand:
    """With one slot, heads want 2 and 6 and leave (-1, 1) each; the one bank is 4."""

    def test_losses_of_the_families(self, one_slot):
        assert float(headwise_loss(*one_slot)) == pytest.approx(2)
        assert float(shared_loss(*one_slot)) == pytest.approx(10)
        assert shared_bank(*one_slot).tolist() == [[pytest.approx(4)]]
        assert one_slot[0].fit(one_slot[1]).flatten().tolist() == pytest.approx([2, 6])
        assert one_slot[0].project(one_slot[1]).flatten().tolist() == pytest.approx([2, 2, 6, 6])

    def test_gap_in_both_forms(self, one_slot):
        assert float(sharing_gap(*one_slot)) == pytest.approx(8)
        assert float(common_retrieval_gap(*one_slot)) == pytest.approx(8)

    def test_hive_of_rank_1_reaches_the_head_wise_loss(self, one_slot):
        assert float(hive_loss(*one_slot, tensor([[1]]), tensor([[[2]], [[6]]]))) == pytest.approx(
            2
        )
        assert best_hive_losses(*one_slot).tolist() == pytest.approx([42, 2, 2])

    def test_bound_is_tight_where_one_slot_is_missed(self, one_slot):
        # Head 1 gets 5 instead of 6: eps = 1, rho = ||(1, 1)||^2 = 2.
        factors = tensor([[1]]), tensor([[[2]], [[5]]])
        assert float(hive_bound(*one_slot, *factors)) == pytest.approx(3)
        assert float(hive_loss(*one_slot, *factors)) == pytest.approx(3)

    def test_heads_with_retrieval_of_their_own(self, two_slots):
        # Slot 0 must serve 2, 0 and 6 with 8/3; head 1 alone would take 3.
        assert shared_bank(*two_slots).flatten().tolist() == pytest.approx([8 / 3, 4])
        assert float(headwise_loss(*two_slots)) == pytest.approx(9)
        assert float(shared_loss(*two_slots)) == pytest.approx(28 / 3)
        assert float(sharing_gap(*two_slots)) == pytest.approx(1 / 3)


@every_regime
def test_shared_optimum_is_numpys_on_the_whole_linear_system(regime):
    retrieval, target, _ = draw(regime)
    width = target.shape[-1]
    rows = retrieval.matrix.flatten(0, 1).numpy()
    # Every number of the bank is one unknown of one system.
    system, wanted = np.kron(rows, np.eye(width)), target.flatten().numpy()
    bank, *_ = np.linalg.lstsq(system, wanted, rcond=1e-9)
    loss = 0.5 * ((system @ bank - wanted) ** 2).sum()
    assert float(shared_loss(retrieval, target)) == pytest.approx(loss, **EXACT)
    for found in (shared_bank(retrieval, target), solve_shared(retrieval, target)):
        np.testing.assert_allclose(found.flatten().numpy(), bank, rtol=1e-8, atol=1e-8)


@every_regime
def test_head_wise_optimum_is_numpys_head_by_head(regime):
    retrieval, target, _ = draw(regime)
    loss, banks = 0.0, retrieval.fit(target).numpy()
    for matrix, wanted, found in zip(retrieval.matrix, target, banks, strict=True):
        bank, *_ = np.linalg.lstsq(matrix.numpy(), wanted.numpy(), rcond=1e-9)
        loss += 0.5 * ((matrix.numpy() @ bank - wanted.numpy()) ** 2).sum()
        np.testing.assert_allclose(found, bank, rtol=1e-8, atol=1e-8)
    assert float(headwise_loss(retrieval, target)) == pytest.approx(loss, **EXACT)


@every_regime
def test_gap_is_the_difference_of_the_two_optima(regime):
    retrieval, target, _ = draw(regime)
    gap = shared_loss(retrieval, target) - headwise_loss(retrieval, target)
    assert float(sharing_gap(retrieval, target)) == pytest.approx(float(gap), **EXACT)
    same = retrieval.of_head(1)
    assert all(torch.equal(matrix, retrieval.matrix[1]) for matrix in same.matrix)
    gap = shared_loss(same, target) - headwise_loss(same, target)
    assert float(common_retrieval_gap(same, target)) == pytest.approx(float(gap), **EXACT)
    assert float(gap) > 0.1


@every_regime
def test_gap_is_zero_exactly_where_a_common_bank_exists(regime):
    retrieval, target, generator = draw(regime)
    bank = draw_normal(retrieval.matrix.shape[-1], target.shape[-1], generator=generator)
    fitting = targets_with_banks(retrieval, bank, target)
    assert float(sharing_gap(retrieval, fitting)) < 1e-20
    assert float(shared_loss(retrieval, fitting)) == pytest.approx(
        float(headwise_loss(retrieval, fitting)), **EXACT
    )
    # Two heads that read the same want different things.
    same = retrieval.of_head(0)
    banks = torch.stack([bank, *[bank + 1] * (len(target) - 1)])
    assert float(sharing_gap(same, targets_with_banks(same, banks, target))) > 0.1


@every_regime
def test_bound_is_made_of_operator_norms_and_remainders(regime):
    retrieval, target, generator = draw(regime)
    heads, slots, width = len(target), retrieval.matrix.shape[-1], target.shape[-1]
    latent_values = draw_normal(slots, 2, generator=generator)
    value_proj = draw_normal(heads, 2, width, generator=generator)
    rho = max(np.linalg.norm(matrix.numpy(), 2) ** 2 for matrix in retrieval.matrix)
    eps = sum(
        np.linalg.norm((bank - latent_values @ projection).numpy()) ** 2
        for bank, projection in zip(retrieval.fit(target), value_proj, strict=True)
    )
    bound = float(headwise_loss(retrieval, target)) + rho * eps / 2
    assert float(hive_bound(retrieval, target, latent_values, value_proj)) == pytest.approx(
        bound, **EXACT
    )
    assert float(hive_loss(retrieval, target, latent_values, value_proj)) <= bound


def test_factors_are_the_nearest_of_their_rank():
    banks = draw_normal(3, 10, 4, generator=torch.Generator().manual_seed(0))
    side_by_side = np.concatenate(list(banks.numpy()), axis=1)
    beyond = np.linalg.svd(side_by_side, compute_uv=False)[5:]
    latent_values, value_proj = factorize(banks, 5)
    assert latent_values.shape == (10, 5)
    assert value_proj.shape == (3, 5, 4)
    missed = (banks - latent_values @ value_proj).square().sum()
    assert float(missed) == pytest.approx((beyond**2).sum(), **EXACT)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_descent_on_hives_own_parameters_ends_at_the_best_loss(rank):
    retrieval, target, generator = draw(REPEATED_TOKENS, seed=1)
    retrieval = retrieval.of_head(0)
    heads, slots, width = len(target), retrieval.matrix.shape[-1], target.shape[-1]
    factors = [
        draw_normal(slots, rank, generator=generator).requires_grad_(),
        draw_normal(heads, rank, width, generator=generator).requires_grad_(),
    ]
    optimizer = torch.optim.LBFGS(
        factors,
        max_iter=2000,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        loss = hive_loss(retrieval, target, *factors)
        loss.backward()
        return loss

    optimizer.step(closure)
    best = float(best_hive_losses(retrieval, target)[rank])
    found = hive_loss(retrieval, target, *factors).detach()
    assert float(found) == pytest.approx(best, rel=1e-7)
    reached = hive_loss(retrieval, target, *best_factors(retrieval, target, rank))
    assert float(reached) == pytest.approx(best, **EXACT)


def test_hive_as_wide_as_a_head_is_never_worse_than_sharing():
    for regime in REGIMES:
        retrieval, target, _ = draw(regime)
        same = retrieval.of_head(0)
        losses = best_hive_losses(same, target)
        assert losses[: target.shape[-1] + 1][-1] <= shared_loss(same, target)
        assert float(losses[0]) == pytest.approx(0.5 * float(target.square().sum()))
        assert float(losses[-1]) == pytest.approx(float(headwise_loss(same, target)), **EXACT)


@pytest.mark.parametrize("seed", [0, 1])
def test_everything_holds_on_a_hundred_instances(seed):
    found = check_random_instances(100, seed)
    assert found.failures() == []
    assert found.max_equality_error < 1e-12
    assert found.max_bound_violation < 1e-14
    assert found.min_strict_gap > 0.01
    assert found.counter_example_gap < 1e-14


def test_instances_have_sparse_rows_and_the_ranks_they_promise():
    for regime in REGIMES:
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            sizes = draw_sizes(regime, generator)
            assert sizes.rank <= sizes.head_width
            assert (sizes.num_tokens < sizes.num_slots) or regime != FEWER_TOKENS
            assert (sizes.num_tokens > sizes.num_slots) or regime != MORE_TOKENS
            matrix = draw_matrix(sizes, generator)
            assert ((matrix > 0).sum(-1) == sizes.top_k).all()
            torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
            if regime == REPEATED_TOKENS and sizes.num_tokens > 1:
                ranks = draw_retrieval(sizes, regime, generator).ranks
                assert max(ranks) < min(sizes.num_tokens, sizes.num_slots)


def test_first_instances_do_not_depend_on_how_many_follow():
    assert check_random_instances(3).min_strict_gap >= check_random_instances(6).min_strict_gap
    assert check_random_instances(6, 1) == check_random_instances(6, 1)
    assert check_random_instances(6, 1) != check_random_instances(6, 2)


def test_a_singular_value_below_the_tolerance_counts_as_zero():
    nearly = tensor([[[1.0, 0, 0], [1 - 1e-8, 1e-8, 0], [0, 0, 1]]])
    clearly = tensor([[[1.0, 0, 0], [0.9, 0.1, 0], [0, 0, 1]]])
    assert Retrieval.of(nearly).ranks == [2]
    assert Retrieval.of(clearly).ranks == [3]
    assert (Retrieval.of(nearly).matrix - nearly).abs().max() < RANK_TOLERANCE
    retrieval = Retrieval.of(torch.cat([nearly, clearly]))
    target = draw_normal(2, 3, 2, generator=torch.Generator().manual_seed(0))
    found = Findings()
    theorem_checks.check_proposition_1(retrieval, target, found)
    theorem_checks.check_proposition_2(
        retrieval, target, *factorize(retrieval.fit(target), 1), found
    )
    assert found.max_equality_error < 1e-9


def wrong_axis(retrieval, target):
    return 0.5 * retrieval.project(target - target.mean(1, keepdim=True)).square().sum()


WRONG = {
    "gap with its sign flipped": ("sharing_gap", lambda r, y: -sharing_gap(r, y)),
    "gap without the half": ("sharing_gap", lambda r, y: 2 * sharing_gap(r, y)),
    "spread without the half": (
        "common_retrieval_gap",
        lambda r, y: 2 * common_retrieval_gap(r, y),
    ),
    "mean over tokens": ("common_retrieval_gap", wrong_axis),
    "bank of the mean target": ("shared_bank", lambda r, y: r.fit(y).mean(0)),
    "residual of the shared bank": ("headwise_loss", shared_loss),
    "one head's bank for all": (
        "shared_loss",
        lambda r, y: correction_loss(r.matrix @ r.fit(y)[0], y),
    ),
    "tail that starts late": ("best_hive_losses", lambda r, y: best_hive_losses(r, y)[1:]),
}


@pytest.mark.parametrize(("name", "wrong"), WRONG.values(), ids=WRONG)
def test_a_wrong_formula_is_noticed(monkeypatch, name, wrong):
    monkeypatch.setattr(theorem_checks, name, wrong)
    found = check_random_instances(9)
    assert found.max_equality_error > 1e-3
    assert any("equality" in failure for failure in found.failures())


def test_a_bound_that_is_too_low_is_noticed(monkeypatch):
    monkeypatch.setattr(
        theorem_checks, "hive_bound", lambda retrieval, target, *_: headwise_loss(retrieval, target)
    )
    found = check_random_instances(9)
    assert found.max_bound_violation > 0.01
    assert any("bound is exceeded" in failure for failure in found.failures())


def test_a_gap_where_there_must_be_none_is_noticed_and_one_that_is_missing_too(one_slot):
    retrieval, target = one_slot
    found = Findings()
    theorem_checks.check_counter_example(retrieval, target, found)
    assert found.counter_example_gap == pytest.approx(8 / 42)
    identical = tensor([[[1], [3]], [[0], [4]]])  # both are (2, 2) to one slot
    assert theorem_checks.check_theorem_1(retrieval, identical, 1, found) == pytest.approx(0)
    gap, missing = sorted(found.failures())
    assert "must be strict" in gap
    assert "counter-example" in missing


def test_theorem_on_the_two_targets_by_hand(one_slot):
    found = Findings()
    assert theorem_checks.check_theorem_1(*one_slot, 1, found) == pytest.approx(8 / 10)
    assert found.min_strict_gap == pytest.approx(0.8)
    assert found.max_equality_error < 1e-14


def test_counter_example_has_different_targets_and_no_gap(one_slot):
    retrieval, _ = one_slot
    found = Findings()
    identical = tensor([[[1], [3]], [[0], [4]]])
    theorem_checks.check_counter_example(retrieval, identical, found)
    assert found.counter_example_gap < 1e-14


def test_nan_does_not_pass_for_small():
    found = Findings()
    found.equal(tensor(math.nan), 0.0, tensor(1))
    found.at_most(tensor(math.nan), tensor(0), tensor(1))
    assert found.max_equality_error == math.inf
    assert found.max_bound_violation == math.inf


@pytest.mark.parametrize(("options", "part"), [((0,), "instances=0"), ((1, -1), "seed=-1")])
def test_numbers_that_make_no_sense_are_refused(options, part):
    with pytest.raises(MidusError, match=part):
        check_random_instances(*options)


def test_gap_grows_with_the_square_of_heterogeneity():
    curve = heterogeneity_curve()
    assert curve["scale"][0] == 0
    assert curve["gap"] == pytest.approx(curve["formula"], rel=1e-9, abs=1e-12)
    assert curve["gap"][0] == pytest.approx(0, abs=1e-12)
    squares = [scale**2 * curve["gap"][-1] for scale in curve["scale"]]
    assert curve["gap"] == pytest.approx(squares, rel=1e-9, abs=1e-12)


def test_rank_curves_fall_from_no_correction_to_the_head_wise_loss():
    curves = random_rank_curves()
    for curve in curves.values():
        assert curve.hive_loss[0] == pytest.approx(1)
        assert curve.hive_loss == sorted(curve.hive_loss, reverse=True)
        assert curve.hive_loss[-1] == pytest.approx(curve.headwise_loss)
        assert curve.headwise_loss < curve.shared_loss < 1
        assert curve.hive_loss[curve.head_width] < curve.shared_loss
    exact, near = curves["exact"], curves["near"]
    # The latent table of the exact one has five columns, fewer than a head is wide.
    assert exact.hive_loss[5] == pytest.approx(exact.headwise_loss)
    assert exact.hive_loss[4] > exact.headwise_loss + 0.01
    assert near.hive_loss[near.head_width] > near.headwise_loss + 0.01
    assert near.headwise_loss == pytest.approx(exact.headwise_loss)


def test_the_shared_bank_needs_no_matrix_a_head_over_all_slots():
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            tensors = found if isinstance(found, tuple) else (found,)
            sizes.extend(t.numel() for t in tensors if isinstance(t, torch.Tensor))
            return found

    generator = torch.Generator().manual_seed(0)
    retrieval = Retrieval.of(torch.rand(8, 4, 50, generator=generator))
    target = torch.rand(8, 4, 3, generator=generator).double()
    with Sizes():
        shared_bank(retrieval, target)
    assert max(sizes) == 50 * 50

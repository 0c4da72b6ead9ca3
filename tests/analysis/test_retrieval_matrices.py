"""A_h and targets of a tiny model: what its memory really does, and finite differences."""

import pytest
import torch
import torch.nn.functional as F
from tiny import MEMORY, TOLERANCE, grown, prompt_ids, relative_error

from midus import MemoryConfig
from midus.analysis import retrieval_matrices
from midus.analysis.retrieval_matrices import collect_retrieval, middle_block
from midus.analysis.theorem_model import check_model
from midus.errors import MidusError

BLOCK, NUM_HEADS, HEAD_WIDTH = 4, 4, 8
STEP = 3e-2


@pytest.fixture
def model():
    return grown().double()


@pytest.fixture
def ids():
    return prompt_ids(length=13)[0]


def loss_with(model, ids, change):
    """The summed loss where ``change`` is added to the block's correction."""
    memory = model.model.layers[BLOCK].memory
    hook = memory.register_forward_hook(lambda module, args, output: output + change)
    with torch.no_grad():
        logits = model(ids[:-1].unsqueeze(0)).logits[0]
    hook.remove()
    return F.cross_entropy(logits, ids[1:], reduction="sum")


def test_matrix_times_the_models_own_banks_is_its_correction(model, ids):
    memory = model.model.layers[BLOCK].memory
    seen = {}

    def keep(module, args, output):
        seen.update(attended=args[0], correction=output)

    hook = memory.register_forward_hook(keep)
    with torch.no_grad():
        model(ids[:-1].unsqueeze(0))
        read = memory.keys(memory.make_queries(seen["attended"]))[0].unique()
    hook.remove()
    collected = collect_retrieval(model, ids, BLOCK)
    banks = memory.values.latent_values[read] @ memory.values.value_proj  # [H, N, O]
    correction = (collected.matrix @ banks.detach()).movedim(0, 1).flatten(1)
    assert collected.matrix.shape == (NUM_HEADS, 12, len(read))
    assert relative_error(correction, seen["correction"][0]) < TOLERANCE[torch.float64]


def test_rows_hold_top_k_weights_that_sum_to_one(model, ids):
    matrix = collect_retrieval(model, ids, BLOCK).matrix
    assert ((matrix > 0).sum(-1) == MEMORY.top_k).all()
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
    assert (matrix > 0).any(0).any(0).all()  # no slot that nobody reads


def test_target_is_the_direction_in_which_the_loss_falls(model, ids):
    target = collect_retrieval(model, ids, BLOCK).target
    assert target.shape == (NUM_HEADS, 12, HEAD_WIDTH)
    assert float(target.norm()) == pytest.approx(1)
    ratios = []
    for head in range(NUM_HEADS):
        # Where a head's target is largest: the family's norms round to float32, even here.
        token, column = divmod(int(target[head].abs().argmax()), HEAD_WIDTH)
        change = torch.zeros(1, 12, NUM_HEADS * HEAD_WIDTH, dtype=torch.float64)
        change[0, token, head * HEAD_WIDTH + column] = STEP
        slope = (loss_with(model, ids, change) - loss_with(model, ids, -change)) / (2 * STEP)
        ratios.append(float(-slope / target[head, token, column]))
    # One positive factor, the norm of the gradient, for all of them.
    assert min(ratios) > 0
    assert ratios == pytest.approx([ratios[0]] * NUM_HEADS, rel=1e-3)


def test_windows_are_read_one_after_the_other(model, ids):
    whole = collect_retrieval(model, ids, BLOCK, window=6)
    parts = [collect_retrieval(model, ids[start : start + 7], BLOCK) for start in (0, 6)]
    assert whole.target.shape[1] == whole.matrix.shape[1] == 12
    for part, rows in zip(parts, (slice(0, 6), slice(6, 12)), strict=True):
        expected = part.target / part.target.norm()
        actual = whole.target[:, rows] / whole.target[:, rows].norm()
        assert relative_error(actual, expected) < TOLERANCE[torch.float64]
        weights = part.matrix.sort(-1).values[..., -MEMORY.top_k :]
        torch.testing.assert_close(
            whole.matrix[:, rows].sort(-1).values[..., -MEMORY.top_k :], weights
        )


def test_model_comes_back_as_it_was(model, ids):
    frozen = next(model.parameters()).requires_grad_(False)
    states = [parameter.requires_grad for parameter in model.parameters()]
    collect_retrieval(model, ids, BLOCK)
    assert [parameter.requires_grad for parameter in model.parameters()] == states
    assert not frozen.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.model.layers[BLOCK].memory._forward_hooks


def test_middle_block_is_the_default(model, ids):
    assert model.config.memory_positions == [1, 4]
    assert middle_block(model.config) == 4
    assert collect_retrieval(model, ids).block == 4


@pytest.mark.parametrize("kind", ["pkm", "linear"])
def test_other_layers_with_one_weight_a_slot_work(kind, ids):
    memory = MemoryConfig(kind=kind, num_subkeys=8, top_k=4)
    collected = collect_retrieval(grown(memory=memory), ids)
    assert collected.latent_dim is None
    found, values = check_model(collected)
    assert found.failures() == []
    assert values["own_retrieval"]["truncated"][0]["rank"] == HEAD_WIDTH


def test_ultramem_has_no_one_matrix(ids):
    model = grown(memory=MemoryConfig(kind="ultramem", num_subkeys=8, top_k=4))
    with pytest.raises(MidusError, match="use a model with hml memory"):
        collect_retrieval(model, ids)


@pytest.mark.parametrize(
    ("ids", "part"),
    [([5], "fewer than two tokens"), ([5, 400], "token 400.*vocabulary of 99")],
)
def test_texts_that_cannot_be_read_are_refused(model, ids, part):
    with pytest.raises(MidusError, match=part):
        collect_retrieval(model, torch.tensor(ids))


def test_a_loss_without_gradient_is_refused(model, ids):
    model.lm_head.weight.data.zero_()
    with pytest.raises(MidusError, match="norm 0"):
        collect_retrieval(model, ids)


def test_statements_hold_on_the_models_retrieval(model):
    collected = collect_retrieval(model, prompt_ids(length=61)[0], BLOCK)
    found, values = check_model(collected)
    assert found.failures() == []
    assert found.max_equality_error < 1e-10
    own, common = values["own_retrieval"], values["common_retrieval"]
    assert values["latent_dim"] == common["theorem"]["rank"] == HEAD_WIDTH
    assert own["headwise_loss"] < own["refitted_loss"] <= own["shared_loss"] < 1
    assert own["truncated"][0]["loss"] <= own["truncated"][0]["bound"]
    gap = (own["shared_loss"] - own["headwise_loss"]) / own["shared_loss"]
    assert own["gap"] == pytest.approx(gap)
    assert 0 < common["theorem"]["gap"] < 1
    by_head = [set(matrix.nonzero()[:, 1].tolist()) for matrix in collected.matrix]
    several = [slot for slot in set().union(*by_head) if sum(slot in h for h in by_head) > 1]
    assert values["slots_read"] == collected.matrix.shape[-1]
    assert values["slots_read_by_several"] == len(several) < values["slots_read"]
    curve, needed = common["rank_curve"], common["ranks_needed"]
    assert curve["hive_loss"][needed["below_shared"]] <= curve["shared_loss"]
    assert curve["hive_loss"][needed["below_shared"] - 1] > curve["shared_loss"]
    assert needed["below_shared"] <= HEAD_WIDTH
    assert needed["90_percent"] < needed["99_percent"] <= curve["rank"][-1]


def test_both_ranks_are_tried_where_the_table_is_narrower_than_a_head(ids):
    memory = MemoryConfig(num_subkeys=8, top_k=4, latent_dim=3)
    found, values = check_model(collect_retrieval(grown(memory=memory), ids))
    assert found.failures() == []
    assert [row["rank"] for row in values["own_retrieval"]["truncated"]] == [3, HEAD_WIDTH]
    assert values["common_retrieval"]["theorem"]["rank"] == 3


def test_fewer_tokens_than_the_rank_are_enough(model, ids):
    found, values = check_model(collect_retrieval(model, ids[:3], BLOCK))
    assert values["num_tokens"] == 2
    assert found.failures() == []


def test_more_slots_than_can_be_solved_for_are_refused(model, ids, monkeypatch):
    num_slots = collect_retrieval(model, ids).matrix.shape[-1]
    monkeypatch.setattr(retrieval_matrices, "_MOST_BYTES", 8 * num_slots**2)
    collect_retrieval(model, ids)
    monkeypatch.setattr(retrieval_matrices, "_MOST_BYTES", 8 * num_slots**2 - 1)
    with pytest.raises(MidusError, match=f"12 tokens read {num_slots} slots, .* lower --tokens"):
        collect_retrieval(model, ids)


def test_windows_are_no_longer_than_the_model_reads(ids):
    model = grown(max_position_embeddings=6).double()
    expected = collect_retrieval(model, ids, window=6)
    assert collect_retrieval(model, ids).target.equal(expected.target)

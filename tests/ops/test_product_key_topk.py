import pytest
import torch

from midus.ops import product_key_topk


def brute_force(queries, row_keys, col_keys, top_k):
    """Scores all n * n pairs in float64 and takes the best."""
    half = queries.shape[-1] // 2
    row = torch.einsum("...he,hne->...hn", queries[..., :half].double(), row_keys.double())
    col = torch.einsum("...he,hne->...hn", queries[..., half:].double(), col_keys.double())
    grid = row.unsqueeze(-1) + col.unsqueeze(-2)  # [..., H, n, n]
    scores, slots = grid.flatten(-2).topk(top_k, dim=-1)
    return slots, scores


def random_inputs(num_heads=3, num_subkeys=7, width=10, tokens=(2, 5), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(*tokens, num_heads, width, generator=generator).to(dtype)
    row_keys = torch.randn(num_heads, num_subkeys, width // 2, generator=generator).to(dtype)
    col_keys = torch.randn(num_heads, num_subkeys, width // 2, generator=generator).to(dtype)
    return queries, row_keys, col_keys


@pytest.mark.parametrize("top_k", [1, 2, 4, 7])
@pytest.mark.parametrize("num_subkeys", [7, 16])
def test_two_stages_find_the_best_of_all_pairs(top_k, num_subkeys):
    inputs = random_inputs(num_subkeys=num_subkeys)
    slots, scores = product_key_topk(*inputs, top_k)
    expected_slots, expected_scores = brute_force(*inputs, top_k)
    assert torch.equal(slots, expected_slots)
    torch.testing.assert_close(scores.double(), expected_scores, rtol=1e-5, atol=1e-5)


def test_equal_scores_give_the_same_scores_as_brute_force():
    queries, row_keys, col_keys = random_inputs()
    row_keys[:, 1:4] = row_keys[:, :1]  # four equal rows in every head
    slots, scores = product_key_topk(queries, row_keys, col_keys, 4)
    _, expected = brute_force(queries, row_keys, col_keys, 4)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == 4 for row in slots.flatten(0, -2).tolist())


def test_slot_number_is_row_times_n_plus_column():
    num_subkeys = 5
    row_keys = torch.eye(num_subkeys).unsqueeze(0)
    col_keys = torch.eye(num_subkeys).unsqueeze(0)
    query = torch.zeros(1, 1, 2 * num_subkeys)
    query[..., 3] = 1  # row 3
    query[..., num_subkeys + 1] = 1  # column 1
    slots, scores = product_key_topk(query, row_keys, col_keys, 1)
    assert slots.item() == 3 * num_subkeys + 1
    assert scores.item() == 2


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_inputs_pick_the_slots_float32_arithmetic_picks(autocast):
    inputs = random_inputs(num_subkeys=64, width=64, tokens=(64,), dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        slots, scores = product_key_topk(*inputs, 4)
    wide = product_key_topk(*(tensor.float() for tensor in inputs), 4)
    assert torch.equal(slots, wide[0])
    assert scores.dtype == torch.float32
    assert torch.equal(scores, wide[1])


@pytest.mark.parametrize("wide", [{0, 1, 2}, {0}, {1}, {2}])
def test_float64_stays_float64(wide):
    inputs = [t.double() if i in wide else t for i, t in enumerate(random_inputs())]
    assert product_key_topk(*inputs, 2)[1].dtype == torch.float64


def test_gradients_match_finite_differences():
    inputs = [t.requires_grad_() for t in random_inputs(dtype=torch.float64, tokens=(3,))]
    assert torch.autograd.gradcheck(lambda *args: product_key_topk(*args, 3)[1], inputs)

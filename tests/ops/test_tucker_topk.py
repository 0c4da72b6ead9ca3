import torch

from midus.ops import tucker_topk
from midus.ops.tucker_topk.reference import leading_vectors

HEADS, SUBKEYS, WIDTH, RANK, CORES = 2, 9, 6, 2, 2


def random_inputs(dtype=torch.float32, tokens=(40,), seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    cores = torch.rand(CORES, HEADS, RANK, RANK, generator=generator).to(dtype)
    keys = (HEADS, SUBKEYS, WIDTH, RANK)
    return draw(*tokens, HEADS, WIDTH), draw(*tokens, HEADS, WIDTH), draw(*keys), draw(*keys), cores


def whole_grid(row_queries, col_queries, row_keys, col_keys, cores):
    rows = torch.einsum("phe,hner->phnr", row_queries, row_keys)
    cols = torch.einsum("phe,hner->phnr", col_queries, col_keys)
    return torch.einsum("phir,chrs,phjs->phijc", rows, cores, cols), rows, cols


def by_rule(inputs, top_k):
    grid, rows, cols = whole_grid(*inputs)
    left, right = leading_vectors(inputs[4].sum(0))
    row_idx = torch.einsum("phnr,hr->phn", rows, left).topk(top_k).indices
    col_idx = torch.einsum("phnr,hr->phn", cols, right).topk(top_k).indices
    slots = torch.empty(*row_idx.shape, dtype=torch.int64)
    for p in range(grid.shape[0]):
        for h in range(HEADS):
            pairs = [(i, j) for i in row_idx[p, h].tolist() for j in col_idx[p, h].tolist()]
            pairs.sort(key=lambda ij: -grid[p, h, ij[0], ij[1]].sum().item())
            slots[p, h] = torch.tensor([i * SUBKEYS + j for i, j in pairs[:top_k]])
    return slots, grid


def test_candidates_and_winners_follow_the_rule():
    inputs = random_inputs()
    slots, scores = tucker_topk(*inputs, 4)
    expected, grid = by_rule(inputs, 4)
    assert torch.equal(slots, expected)
    flat = grid.flatten(2, 3)
    picked = flat.gather(2, expected.unsqueeze(-1).expand(*expected.shape, CORES))
    torch.testing.assert_close(scores, picked, rtol=1e-4, atol=1e-5)


def test_recall_against_the_whole_grid(record_property):
    """What rank-1 routing finds of the true Top-k: reported, and far above chance."""
    inputs = random_inputs(tokens=(400,))
    slots, _ = tucker_topk(*inputs, 4)
    grid, _, _ = whole_grid(*inputs)
    best = grid.sum(-1).flatten(2).topk(4).indices
    hits = (slots.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean().item()
    record_property("recall", hits)
    print(f"recall of rank-1 routing: {hits:.3f}")
    assert hits > 5 * 4 / SUBKEYS**2


def test_a_core_of_rank_one_is_searched_exactly_where_scores_are_positive():
    queries = random_inputs()
    left, right = torch.rand(HEADS, RANK), torch.rand(HEADS, RANK)
    cores = torch.stack([torch.einsum("hr,hs->hrs", left, right)] * CORES)
    row_keys, col_keys = queries[2].abs(), queries[3].abs()
    inputs = (queries[0].abs(), queries[1].abs(), row_keys, col_keys, cores)
    slots, _ = tucker_topk(*inputs, 4)
    grid, _, _ = whole_grid(*inputs)
    assert torch.equal(slots, grid.sum(-1).flatten(2).topk(4).indices)


def test_leading_vectors_rebuild_a_rank_one_matrix_with_a_positive_left_side():
    left, right = torch.tensor([[0.6, 0.8]]), torch.tensor([[0.8, -0.6]])
    matrix = 3 * left.unsqueeze(-1) * right.unsqueeze(-2)
    found_left, found_right = leading_vectors(matrix)
    torch.testing.assert_close(found_left, left)
    torch.testing.assert_close(found_right, right)


def test_equal_scores_give_distinct_slots():
    inputs = list(random_inputs())
    inputs[2][:, 1:4] = inputs[2][:, :1]
    slots, _ = tucker_topk(*inputs, 4)
    assert all(len(set(row)) == 4 for row in slots.flatten(0, -2).tolist())


def test_gradients_match_finite_differences():
    inputs = [t.requires_grad_() for t in random_inputs(torch.float64, tokens=(3,))]
    assert torch.autograd.gradcheck(lambda *args: tucker_topk(*args, 3)[1], inputs)


def test_leading_vectors_of_rank_two_are_those_of_the_decomposition():
    torch.manual_seed(7)
    matrices = torch.randn(50, 2, 2, dtype=torch.float64)
    matrices[0] = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    matrices[1] = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    left, right = leading_vectors(matrices)
    u, _, vh = torch.linalg.svd(matrices)
    # The pair is one up to a common sign.
    outer = torch.einsum("br,bs->brs", left, right)
    torch.testing.assert_close(outer, torch.einsum("br,bs->brs", u[..., 0], vh[:, 0]))
    assert (left.sum(-1) > 0).all()

import torch

from midus.ops import linear_topk
from midus.ops.linear_topk import reference


def random_inputs(dtype=torch.float32, tokens=(2, 5)):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(*tokens, 3, 8, generator=generator).to(dtype)
    keys = torch.randn(3, 20, 8, generator=generator).to(dtype)
    return queries, keys


def test_finds_the_best_slots_of_every_head():
    queries, keys = random_inputs()
    slots, scores = linear_topk(queries, keys, 4)
    expected = torch.einsum("bthe,hne->bthn", queries, keys).topk(4, dim=-1)
    assert torch.equal(slots, expected.indices)
    torch.testing.assert_close(scores, expected.values)


def test_chunks_give_the_same_and_never_all_scores(monkeypatch):
    queries, keys = random_inputs(tokens=(7, 9))
    whole = linear_topk(queries, keys, 4)
    sizes = []
    real = torch.einsum

    def watched(pattern, *tensors):
        out = real(pattern, *tensors)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", 3 * 20 * 10)
    monkeypatch.setattr(torch, "einsum", watched)
    pieces = linear_topk(queries, keys, 4)
    assert max(sizes) == 3 * 20 * 10
    assert len(sizes) == 7
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_equal_scores_give_distinct_slots():
    queries, keys = random_inputs()
    keys[:, 1:6] = keys[:, :1]
    slots, scores = linear_topk(queries, keys, 4)
    expected = torch.einsum("bthe,hne->bthn", queries, keys).topk(4, dim=-1).values
    torch.testing.assert_close(scores, expected)
    assert all(len(set(row)) == 4 for row in slots.flatten(0, -2).tolist())


def test_bfloat16_picks_the_slots_float32_picks():
    queries, keys = random_inputs(torch.bfloat16, tokens=(64,))
    slots, scores = linear_topk(queries, keys, 4)
    assert torch.equal(slots, linear_topk(queries.float(), keys.float(), 4)[0])
    assert scores.dtype == torch.float32


def test_gradients_match_finite_differences():
    inputs = [t.requires_grad_() for t in random_inputs(torch.float64, tokens=(3,))]
    assert torch.autograd.gradcheck(lambda q, k: linear_topk(q, k, 3)[1], inputs)

"""The Triton kernels of linear_topk against its reference and against float64."""

from typing import NamedTuple

import pytest
import torch
from layers import error
from triton_on_cpu import DEVICE

from midus import MidusError
from midus.ops import linear_topk
from midus.ops.linear_topk.kernels import _split_slots


class Shape(NamedTuple):
    tokens: int
    heads: int
    width: int
    slots: int
    top_k: int


SHAPES = [
    Shape(1, 1, 8, 1, 1),
    Shape(5, 2, 48, 100, 3),
    Shape(70, 3, 64, 130, 4),
    Shape(140, 9, 16, 70, 8),  # two blocks of tokens
    Shape(3, 2, 150, 1000, 4),  # queries wider than a block; programs that share the slots
    Shape(2, 1, 64, 70, 16),
]
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16

pytestmark = pytest.mark.usefixtures("poisoned")


def random_inputs(shape, query_type=FLOAT32, key_type=FLOAT32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(shape.tokens, shape.heads, shape.width, generator=generator)
    keys = torch.randn(shape.heads, shape.slots, shape.width, generator=generator)
    keys *= shape.width**-0.5
    return queries.to(DEVICE, query_type), keys.to(DEVICE, key_type)


def scores_of(queries, keys, slot_idx):
    """The scores of given slots; differentiable."""
    return torch.einsum("the,hne->thn", queries, keys).gather(-1, slot_idx)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_scores_and_gradients_are_those_of_the_reference(shape, seed):
    inputs = random_inputs(shape, seed=seed)
    results = []
    for backend in ("reference", "triton"):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        slot_idx, scores = linear_topk(*leaves, shape.top_k, backend=backend)
        weights = torch.arange(scores.numel(), device=DEVICE).view(scores.shape).cos()
        (scores * weights).sum().backward()
        results.append((slot_idx, scores, *(leaf.grad for leaf in leaves)))
    (slots, scores, *grads), (our_slots, our_scores, *our_grads) = results
    assert our_slots.dtype == torch.int64
    torch.testing.assert_close(our_scores, scores, rtol=1e-5, atol=1e-5)
    # Sums in another order may swap scores that agree in nearly all their bits.
    same = our_slots == slots
    assert same.float().mean() > 0.99
    if same.all():
        assert all(error(a, b) < 2e-6 for a, b in zip(our_grads, grads, strict=True))


@pytest.mark.parametrize("types", [(BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT32, BFLOAT16)])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_sixteen_bits_match_float64(shape, types, seed):
    inputs = random_inputs(shape, *types, seed)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    slot_idx, scores = linear_topk(*leaves, shape.top_k, backend="triton")
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = scores_of(*wide, slot_idx)
    best = torch.einsum("the,hne->thn", *wide).topk(shape.top_k, dim=-1).values
    assert scores.dtype == torch.float32
    assert all(len(set(row)) == shape.top_k for row in slot_idx.flatten(0, 1).tolist())
    torch.testing.assert_close(expected, best, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed + 1)).to(DEVICE)
    scores.backward(grad)
    expected.backward(grad.double())
    for leaf, double in zip(leaves, wide, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert error(leaf.grad, double.grad) < 5e-3


@pytest.mark.parametrize("tokens", [2, 300])
def test_equal_scores_go_to_the_lowest_slot(tokens, seed):
    # Small integers: many equal scores, and none of them rounded. Few tokens share the slots.
    shape = Shape(tokens, 2, 8, 600, 5)
    inputs = [(tensor * 2).round() for tensor in random_inputs(shape, seed=seed)]
    slot_idx, scores = linear_topk(*inputs, 5, backend="triton")
    expected = torch.einsum("the,hne->thn", *inputs).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(scores, expected.values[..., :5])
    assert torch.equal(slot_idx, expected.indices[..., :5])


def test_all_scores_equal():
    queries, keys = random_inputs(Shape(3, 2, 8, 200, 4))
    slot_idx, scores = linear_topk(queries * 0, keys, 4, backend="triton")
    assert torch.equal(slot_idx, torch.arange(4, device=DEVICE).expand(3, 2, 4))
    assert not scores.any()


@pytest.mark.parametrize("rising", [False, True])
def test_scores_in_order_of_the_slots(rising):
    keys = torch.arange(300.0, device=DEVICE).view(1, -1, 1) * (1 if rising else -1)
    slot_idx, scores = linear_topk(torch.ones(2, 1, 1, device=DEVICE), keys, 4, backend="triton")
    expected = [299, 298, 297, 296] if rising else [0, 1, 2, 3]
    assert slot_idx[0, 0].tolist() == expected
    assert torch.equal(scores, keys[0, slot_idx, 0])


def test_a_nan_wins_and_stays_with_its_token():
    queries, keys = random_inputs(Shape(20, 2, 16, 100, 4))
    expected = linear_topk(queries, keys, 4, backend="triton")
    queries[3, 1, 5] = torch.nan
    slot_idx, scores = linear_topk(queries, keys, 4, backend="triton")
    is_other = torch.ones(20, 2, dtype=torch.bool, device=DEVICE)
    is_other[3, 1] = False
    assert torch.equal(slot_idx[is_other], expected[0][is_other])
    assert torch.equal(scores[is_other], expected[1][is_other])
    assert (scores[3, 1] == torch.inf).all()
    assert scores[3, 1].softmax(-1).isnan().all()
    assert slot_idx[3, 1].tolist() == [0, 1, 2, 3]
    keys[0, 77, 2] = torch.nan
    slot_idx, scores = linear_topk(queries, keys, 4, backend="triton")
    assert (slot_idx[:, 0, 0] == 77).all()
    assert (scores[:, 0, 0] == torch.inf).all()


def test_scores_of_minus_infinity_leave_slots_that_exist():
    keys = torch.full((1, 70, 8), -torch.inf, device=DEVICE)
    slot_idx, scores = linear_topk(torch.ones(2, 1, 8, device=DEVICE), keys, 4, backend="triton")
    assert (slot_idx >= 0).all()
    assert (slot_idx < 70).all()
    assert (scores == -torch.inf).all()


def test_strided_queries_of_a_batch():
    shape = Shape(12, 3, 24, 90, 3)
    queries, keys = random_inputs(shape)
    wide = torch.randn(2, 6, 3, 64, device=DEVICE)
    wide[..., 8:32] = queries.view(2, 6, 3, 24)
    leaf = wide.requires_grad_()
    slot_idx, scores = linear_topk(leaf[..., 8:32], keys, 3, backend="triton")
    expected = linear_topk(queries, keys, 3, backend="triton")
    assert slot_idx.shape == scores.shape == (2, 6, 3, 3)
    assert torch.equal(slot_idx.view(12, 3, 3), expected[0])
    scores.sum().backward()
    chosen = keys[torch.arange(3, device=DEVICE)[:, None], slot_idx]  # [B, T, H, K, E]
    torch.testing.assert_close(leaf.grad[..., 8:32], chosen.sum(-2))


def test_no_tokens():
    queries, keys = random_inputs(Shape(3, 2, 8, 20, 2))
    leaves = [queries[:0].requires_grad_(), keys.requires_grad_()]
    slot_idx, scores = linear_topk(*leaves, 2, backend="triton")
    assert slot_idx.shape == scores.shape == (0, 2, 2)
    scores.sum().backward()
    assert leaves[0].grad.shape == leaves[0].shape
    assert not leaves[1].grad.any()


def test_splits_of_the_slots_are_whole_blocks_that_cover_them():
    for num_slots in (1, 64, 65, 1000, 4096, 5000):
        for programs in (1, 9, 100, 300):
            splits, each = _split_slots(num_slots, 64, programs)
            assert each % 64 == 0
            assert (splits - 1) * each < num_slots <= splits * each
    assert _split_slots(4096, 64, 2304)[0] == 1
    assert _split_slots(4096, 64, 9)[0] == 16


def test_operator_holds_what_torch_library_asks_of_it():
    queries, keys = random_inputs(Shape(4, 2, 8, 20, 2))
    args = (queries.requires_grad_(), keys.requires_grad_(), 2)
    # Not its comparison of compiled with eager runs: that adds all outputs up, slot numbers too.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.midus.linear_topk.default, args, test_utils=checks)


def test_compiles_as_one_graph_and_gives_the_same():
    inputs = random_inputs(Shape(6, 2, 8, 20, 2))
    compiled = torch.compile(linear_topk, fullgraph=True, backend="aot_eager")
    grads = []
    for function in (linear_topk, compiled):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        function(*leaves, 2, backend="triton")[1].square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(error(a, b) < 1e-6 for a, b in zip(*grads, strict=True))


def test_refuses_what_the_kernels_cannot_keep():
    queries, keys = random_inputs(Shape(3, 2, 8, 20, 2))
    with pytest.raises(MidusError, match="top_k=17 and rank 1; the kernels keep up to 16"):
        linear_topk(queries, keys, 17, backend="triton")
    assert linear_topk(queries, keys, 17)[0].shape == (3, 2, 17)
    with pytest.raises(MidusError, match="top_k=21 is not between 1 and the 20 slots"):
        linear_topk(queries, keys, 21)
    with pytest.raises(MidusError, match=r"keys has shape \(2, 20, 7\), expected \(2, 20, 8\)"):
        linear_topk(queries, keys[..., 1:], 2)

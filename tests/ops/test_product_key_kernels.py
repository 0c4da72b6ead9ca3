"""The Triton kernels of product_key_topk against float64 and against the reference."""

import pytest
import torch
from layers import Shape, best_scores, error, random_layer, scores_of
from triton_on_cpu import DEVICE, HAS_CUDA

from midus.ops import product_key_topk

SHAPES = [
    Shape(1, 1, 2, 8, 1, 1, 1),
    Shape(5, 3, 10, 8, 3, 1, 1),
    Shape(70, 9, 64, 16, 4, 1, 1),
    Shape(20, 2, 150, 40, 7, 1, 1),
    Shape(300, 1, 8, 8, 2, 1, 1),  # more than one split of the tokens
]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in SHAPES),
        *((shape, torch.bfloat16) for shape in SHAPES[1:]),  # errors of one number do not average
    ],
    ids=str,
)
def test_scores_and_gradients_match_float64(shape, dtype, seed):
    layer = random_layer(shape, dtype, seed)
    leaves = [tensor.requires_grad_() for tensor in layer[:3]]
    slot_idx, scores = product_key_topk(*leaves, shape.top_k, backend="triton")
    wide = layer.wide()
    expected = scores_of(wide, slot_idx)
    assert slot_idx.dtype == torch.int64
    assert all(len(set(row)) == shape.top_k for row in slot_idx.flatten(0, 1).tolist())
    torch.testing.assert_close(expected, best_scores(wide, shape.top_k), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed + 1)).to(DEVICE)
    scores.backward(grad)
    expected.backward(grad.double())
    for leaf, double in zip(leaves, wide, strict=False):
        assert error(leaf.grad, double.grad) < (1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("search", ["two_stage", "cartesian"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_equal_scores_go_to_the_lowest_slot(search, backend, seed):
    # Small integers: many equal scores, and none of them rounded.
    layer = [
        (tensor * 2).round() for tensor in random_layer(Shape(40, 2, 8, 8, 4, 1, 1), seed=seed)[:3]
    ]
    slot_idx, scores = product_key_topk(*layer, 4, backend=backend, search=search)
    half = layer[0].shape[-1] // 2
    rows = torch.einsum("the,hne->thn", layer[0][..., :half], layer[1])
    cols = torch.einsum("the,hne->thn", layer[0][..., half:], layer[2])
    grid = (rows.unsqueeze(-1) + cols.unsqueeze(-2)).flatten(-2)
    expected = grid.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(scores, expected.values[..., :4])
    assert torch.equal(slot_idx, expected.indices[..., :4])


@pytest.mark.skipif(not HAS_CUDA, reason="NumPy adds in another order for one row than for many")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_searches_have_bit_equal_scores(dtype, seed):
    layer = random_layer(Shape(12, 9, 128, 64, 4, 1, 1), dtype, seed)[:3]
    slots, scores = product_key_topk(*layer, 5, search="two_stage")
    other_slots, other_scores = product_key_topk(*layer, 5, search="cartesian")
    assert torch.equal(scores, other_scores)
    is_clear = scores[..., 3] > scores[..., 4]
    assert torch.equal(slots[..., :4][is_clear], other_slots[..., :4][is_clear])


def test_no_tokens():
    layer = random_layer(Shape(3, 2, 8, 8, 2, 1, 1))
    leaves = [layer.queries[:0].requires_grad_(), *(t.requires_grad_() for t in layer[1:3])]
    slot_idx, scores = product_key_topk(*leaves, 2, backend="triton")
    assert slot_idx.shape == scores.shape == (0, 2, 2)
    scores.sum().backward()
    assert not leaves[1].grad.any()


def test_operator_holds_what_torch_library_asks_of_it():
    layer = random_layer(Shape(4, 2, 8, 8, 2, 1, 1))
    args = (*(t.requires_grad_() for t in layer[:3]), 2, False)
    # Not its comparison of compiled with eager runs: that adds all outputs up, slot numbers too.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.midus.product_key_topk.default, args, test_utils=checks)


def test_compiles_as_one_graph_and_gives_the_same():
    layer = random_layer(Shape(6, 2, 8, 8, 2, 1, 1))
    compiled = torch.compile(product_key_topk, fullgraph=True, backend="aot_eager")
    grads = []
    for function in (product_key_topk, compiled):
        leaves = [tensor.detach().requires_grad_() for tensor in layer[:3]]
        function(*leaves, 2, backend="triton")[1].square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(error(a, b) < 1e-6 for a, b in zip(*grads, strict=True))

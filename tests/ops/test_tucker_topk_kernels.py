"""The Triton kernels of tucker_topk against its reference, and gradients against float64."""

from typing import NamedTuple

import pytest
import torch
from layers import error
from triton_on_cpu import DEVICE

from midus import MidusError
from midus.ops import tucker_topk


class Shape(NamedTuple):
    tokens: int
    heads: int
    width: int
    subkeys: int
    rank: int
    cores: int
    top_k: int


SHAPES = [
    Shape(1, 1, 8, 2, 2, 1, 1),
    Shape(5, 2, 24, 10, 2, 2, 3),
    Shape(70, 3, 32, 128, 2, 2, 4),
    Shape(20, 2, 48, 33, 3, 2, 8),  # a decomposition of rank three; wider than a block
    Shape(300, 1, 8, 9, 1, 3, 2),  # more than one block of winners
]
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16

pytestmark = pytest.mark.usefixtures("poisoned")


def random_inputs(shape, query_type=FLOAT32, key_type=FLOAT32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size, dtype, scale=1.0):
        return (torch.randn(*size, generator=generator) * scale).to(DEVICE, dtype)

    queries = (shape.tokens, shape.heads, shape.width)
    keys = (shape.heads, shape.subkeys, shape.width, shape.rank)
    cores = torch.rand(shape.cores, shape.heads, shape.rank, shape.rank, generator=generator)
    return [
        draw(*queries, dtype=query_type),
        draw(*queries, dtype=query_type),
        draw(*keys, dtype=key_type, scale=shape.width**-0.5),
        draw(*keys, dtype=key_type, scale=shape.width**-0.5),
        cores.to(DEVICE, key_type),
    ]


def scores_of(row_queries, col_queries, row_keys, col_keys, cores, slot_idx):
    """The scores of given slots for each core; differentiable."""
    rank, num_subkeys = cores.shape[-1], row_keys.shape[1]
    rows = torch.einsum("the,hner->thnr", row_queries, row_keys)
    cols = torch.einsum("the,hner->thnr", col_queries, col_keys)
    wide = (*slot_idx.shape, rank)
    rows = rows.gather(2, (slot_idx // num_subkeys).unsqueeze(-1).expand(wide))
    cols = cols.gather(2, (slot_idx % num_subkeys).unsqueeze(-1).expand(wide))
    return torch.einsum("thkr,chrs,thks->thkc", rows, cores, cols)


def check_gradients(leaves, slot_idx, scores, seed, tolerance):
    grad = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed + 1)).to(DEVICE)
    scores.backward(grad)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = scores_of(*wide, slot_idx)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-5)
    expected.backward(grad.double())
    for leaf, double in zip(leaves, wide, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert error(leaf.grad, double.grad) < tolerance


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_scores_and_gradients_are_those_of_the_reference(shape, seed):
    inputs = random_inputs(shape, seed=seed)
    expected_slots, expected_scores = tucker_topk(*inputs, shape.top_k, backend="reference")
    leaves = [tensor.requires_grad_() for tensor in inputs]
    slot_idx, scores = tucker_topk(*leaves, shape.top_k, backend="triton")
    assert slot_idx.dtype == torch.int64
    assert scores.shape == expected_scores.shape
    # Sums in another order may swap scores that agree in nearly all their bits.
    same = (slot_idx == expected_slots).all(-1)
    assert same.float().mean() > 0.98
    torch.testing.assert_close(scores[same], expected_scores[same], rtol=1e-4, atol=1e-5)
    # One token: nothing averages, and a score near zero has lost its last bits.
    check_gradients(leaves, slot_idx, scores, seed, 1e-5 if shape.tokens > 1 else 1e-3)


@pytest.mark.parametrize("types", [(BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16)])
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_sixteen_bits_pick_the_slots_of_float32(shape, types, seed):
    inputs = random_inputs(shape, *types, seed)
    expected, _ = tucker_topk(*inputs, shape.top_k, backend="reference")
    leaves = [tensor.requires_grad_() for tensor in inputs]
    slot_idx, scores = tucker_topk(*leaves, shape.top_k, backend="triton")
    assert scores.dtype == torch.float32
    assert (slot_idx == expected).all(-1).float().mean() > 0.9
    assert all(len(set(row)) == shape.top_k for row in slot_idx.flatten(0, 1).tolist())
    check_gradients(leaves, slot_idx, scores, seed, 5e-3)


def test_equal_scores_go_to_the_lowest_row_column_and_slot(seed):
    # Small integers and a core that routes by the first of two scores: many ties, none rounded.
    shape = Shape(40, 2, 8, 12, 2, 1, 4)
    *inputs, cores = random_inputs(shape, seed=seed)
    inputs = [(tensor * 2).round() for tensor in inputs]
    inputs[2], inputs[3] = (keys.mul(2).round() for keys in inputs[2:])
    cores = torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=DEVICE).expand(cores.shape).contiguous()
    slot_idx, scores = tucker_topk(*inputs, cores, 4, backend="triton")
    rows = torch.einsum("the,hne->thn", inputs[0], inputs[2][..., 0])
    cols = torch.einsum("the,hne->thn", inputs[1], inputs[3][..., 0])
    order = {"dim": -1, "descending": True, "stable": True}
    # In rising order, so that candidates, row by row, are in the order of their slot numbers.
    row_idx = rows.sort(**order).indices[..., :4].sort(-1).values
    col_idx = cols.sort(**order).indices[..., :4].sort(-1).values
    pairs = rows.gather(-1, row_idx).unsqueeze(-1) * cols.gather(-1, col_idx).unsqueeze(-2)
    slots = row_idx.unsqueeze(-1) * 12 + col_idx.unsqueeze(-2)
    best = pairs.flatten(-2).sort(**order)
    assert torch.equal(slot_idx, slots.flatten(-2).gather(-1, best.indices[..., :4]))
    assert torch.equal(scores.squeeze(-1), best.values[..., :4])


def test_a_nan_stays_with_its_token():
    inputs = random_inputs(SHAPES[1])
    expected = tucker_topk(*inputs, 3, backend="triton")
    inputs[0][2, 1, 5] = torch.nan
    slot_idx, scores = tucker_topk(*inputs, 3, backend="triton")
    is_other = torch.ones(5, 2, dtype=torch.bool, device=DEVICE)
    is_other[2, 1] = False
    assert torch.equal(slot_idx[is_other], expected[0][is_other])
    assert torch.equal(scores[is_other], expected[1][is_other])
    assert scores[2, 1].isnan().all()
    assert (slot_idx >= 0).all()
    assert (slot_idx < 100).all()


def test_strided_queries_of_a_batch_and_keys_as_norms_leave_them():
    shape = SHAPES[1]._replace(tokens=6)
    inputs = random_inputs(shape)
    expected = tucker_topk(*inputs, 3, backend="triton")
    both = torch.cat(inputs[:2], dim=-1).view(2, 3, 2, 48)
    keys = [tensor.movedim(-1, 2).contiguous().movedim(2, -1) for tensor in inputs[2:4]]
    slot_idx, scores = tucker_topk(*both.chunk(2, dim=-1), *keys, inputs[4], 3, backend="triton")
    assert torch.equal(slot_idx.view(6, 2, 3), expected[0])
    assert torch.equal(scores.view(6, 2, 3, 2), expected[1])


def test_no_tokens():
    inputs = random_inputs(SHAPES[1])
    inputs[:2] = (tensor[:0] for tensor in inputs[:2])
    leaves = [tensor.requires_grad_() for tensor in inputs]
    slot_idx, scores = tucker_topk(*leaves, 3, backend="triton")
    assert slot_idx.shape == (0, 2, 3)
    assert scores.shape == (0, 2, 3, 2)
    scores.sum().backward()
    assert all(leaf.grad.shape == leaf.shape and not leaf.grad.any() for leaf in leaves)


def test_what_is_kept_for_the_backward_pass_grows_with_the_winners_only():
    sizes = []
    leaves = [tensor.requires_grad_() for tensor in random_inputs(SHAPES[2])]
    own = {leaf.data_ptr() for leaf in leaves}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tucker_topk(*leaves, 4, backend="triton")
    assert sum(sizes) == 70 * 3 * 4 * (1 + 2 + 2)


def test_operator_holds_what_torch_library_asks_of_it():
    args = (*(t.requires_grad_() for t in random_inputs(SHAPES[1])), 3)
    # Not its comparison of compiled with eager runs: that adds all outputs up, slot numbers too.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.midus.tucker_topk.default, args, test_utils=checks)


def test_compiles_as_one_graph_and_gives_the_same():
    inputs = random_inputs(SHAPES[1])
    compiled = torch.compile(tucker_topk, fullgraph=True, backend="aot_eager")
    grads = []
    for function in (tucker_topk, compiled):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        function(*leaves, 3, backend="triton")[1].square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(error(a, b) < 1e-6 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_changes_nothing(autocast):
    inputs = random_inputs(SHAPES[1])
    expected = tucker_topk(*inputs, 3, backend="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        found = tucker_topk(*inputs, 3, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_refuses_what_the_kernels_cannot_keep():
    inputs = random_inputs(Shape(2, 1, 8, 20, 9, 1, 2))
    with pytest.raises(MidusError, match="top_k=2 and rank 9; the kernels keep up to 16"):
        tucker_topk(*inputs, 2, backend="triton")
    assert tucker_topk(*inputs, 2)[0].shape == (2, 1, 2)
    with pytest.raises(MidusError, match="top_k=21 is not between 1 and the 20 sub-keys"):
        tucker_topk(*inputs, 21)
    with pytest.raises(MidusError, match="col_keys has shape"):
        tucker_topk(*inputs[:3], inputs[3][:, 1:], inputs[4], 2)

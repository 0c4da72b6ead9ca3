"""The Triton kernels of weighted_gather against float64: above all the gradient of the table."""

import pytest
import torch
from layers import ERROR, error
from triton_on_cpu import DEVICE, HAS_CUDA

from midus.ops import weighted_gather
from midus.ops.weighted_gather import reference
from midus.ops.weighted_gather.kernels import sort_entries, table_gradient

pytestmark = pytest.mark.usefixtures("poisoned")


def random_inputs(num_bags, bag_size, num_rows, width, dtype=torch.float32, seed=0, spread=None):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, width, generator=generator)
    slot_idx = torch.randint(0, spread or num_rows, (num_bags, bag_size), generator=generator)
    weights = torch.randn(num_bags, bag_size, generator=generator)
    grad_out = torch.randn(num_bags, width, generator=generator)
    tensors = (values.to(dtype), slot_idx, weights, grad_out.to(dtype))
    return [tensor.to(DEVICE) for tensor in tensors]


def check(values, slot_idx, weights, grad_out, tolerance):
    leaves = [tensor.detach().requires_grad_() for tensor in (values, weights)]
    out = weighted_gather(leaves[0], slot_idx, leaves[1], backend="triton")
    out.backward(grad_out)
    wide = [tensor.detach().double().requires_grad_() for tensor in (values, weights)]
    expected = reference.weighted_gather(wide[0], slot_idx, wide[1])
    expected.backward(grad_out.double())
    assert out.dtype == values.dtype
    assert error(out, expected) < tolerance
    assert error(leaves[0].grad, wide[0].grad) < tolerance
    assert error(leaves[1].grad, wide[1].grad) < tolerance
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    ("num_bags", "bag_size", "num_rows", "width"),
    [
        (1, 1, 1, 1),
        (7, 3, 10, 5),
        (100, 4, 64, 16),
        (50, 36, 130, 20),
        (30, 5, 1000, 300),
        (3, 2, 70_000, 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_output_and_gradients_match_float64(num_bags, bag_size, num_rows, width, dtype, seed):
    inputs = random_inputs(num_bags, bag_size, num_rows, width, dtype, seed)
    check(*inputs, ERROR[dtype] * (1 if num_bags > 1 else 4))  # one number: nothing averages


@pytest.mark.parametrize("spread", [1, 2, 65, 129])
def test_hot_rows_are_summed_across_programs(spread, seed):
    # 1,200 entries on few rows: runs longer than a program, and buckets that share a program.
    inputs = random_inputs(300, 4, 200, 8, seed=seed, spread=spread)
    check(*inputs, ERROR[torch.float32])


def test_rows_nobody_chose_have_no_gradient(seed):
    values, slot_idx, weights, grad_out = random_inputs(5, 2, 300, 8, seed=seed)
    slot_idx = slot_idx % 2 * 299  # the first row and the last, buckets apart
    grad, _ = check(values, slot_idx, weights, grad_out, ERROR[torch.float32])
    assert not grad[1:299].any()


@pytest.mark.parametrize("num_slots", [64 * 256, 64 * 256 + 1, 64 * 2**15, 64 * 2**15 + 1])
def test_buckets_keep_their_order_in_any_width(num_slots):
    slot_idx = torch.tensor([[num_slots - 1, 0], [num_slots // 2, num_slots - 1]], device=DEVICE)
    buckets, order = sort_entries(slot_idx, num_slots)
    assert buckets.tolist() == sorted((slot_idx.flatten() // 64).tolist())
    assert order.tolist() == [1, 2, 0, 3]


def test_small_weights_of_float16_rows_are_kept(seed):
    values, slot_idx, weights, grad_out = random_inputs(100, 4, 64, 16, torch.float16, seed)
    weights, grad_out = weights * 1e-6, grad_out * 1e3
    grad = table_gradient(grad_out, slot_idx, weights, 64, torch.float32)
    wide = values.double().requires_grad_()
    reference.weighted_gather(wide, slot_idx, weights.double()).backward(grad_out.double())
    assert error(grad, wide.grad) < ERROR[torch.float16]


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(frozen):
    values, slot_idx, weights, grad_out = random_inputs(7, 3, 10, 5)
    leaves = [values.requires_grad_(frozen != 0), weights.requires_grad_(frozen != 1)]
    weighted_gather(leaves[0], slot_idx, leaves[1], backend="triton").backward(grad_out)
    assert leaves[frozen].grad is None
    assert leaves[1 - frozen].grad.any()


def test_slots_outside_the_table_read_nan_and_write_nowhere():
    values, slot_idx, weights, grad_out = random_inputs(7, 3, 10, 5)
    slot_idx[2, 1], slot_idx[4, 0] = 10, -1
    leaf = values.requires_grad_()
    out = weighted_gather(leaf, slot_idx, weights, backend="triton")
    assert out.isnan().all(dim=-1).nonzero().flatten().tolist() == [2, 4]
    out.backward(grad_out)
    assert leaf.grad.isfinite().all()


def test_second_derivatives_are_refused():
    values, slot_idx, weights, _ = random_inputs(7, 3, 10, 5)
    leaves = [values.requires_grad_(), weights.requires_grad_()]
    out = weighted_gather(leaves[0], slot_idx, leaves[1], backend="triton").square().sum()
    (grad,) = torch.autograd.grad(out, leaves[1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


def test_table_gradient_is_the_same_to_the_bit():
    inputs = random_inputs(300, 4, 100, 16)
    first, second = (check(*inputs, ERROR[torch.float32])[0] for _ in range(2))
    assert torch.equal(first, second)


def test_strided_inputs_and_gradients(seed):
    values, slot_idx, weights, grad_out = random_inputs(12, 4, 30, 8, seed=seed)
    check(values.t().contiguous().t(), slot_idx, weights, grad_out, ERROR[torch.float32])
    check(values, slot_idx.t().contiguous().t(), weights.t().contiguous().t(), grad_out, 1e-6)
    leaf = values.clone().requires_grad_()
    weighted_gather(leaf, slot_idx, weights, backend="triton").sum().backward()  # stride 0
    wide = values.double().requires_grad_()
    reference.weighted_gather(wide, slot_idx, weights.double()).sum().backward()
    assert error(leaf.grad, wide.grad) < 1e-6


def test_no_bags():
    values = torch.randn(6, 4, device=DEVICE).requires_grad_()
    slot_idx = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)
    out = weighted_gather(values, slot_idx, torch.zeros(0, 3, device=DEVICE), backend="triton")
    assert out.shape == (0, 4)
    out.sum().backward()
    assert not values.grad.any()


def test_operator_holds_what_torch_library_asks_of_it():
    values, slot_idx, weights, _ = random_inputs(4, 3, 6, 5)
    args = (values.requires_grad_(), slot_idx, weights.requires_grad_())
    torch.library.opcheck(torch.ops.midus.weighted_gather.default, args)


def test_a_weight_for_every_row_is_asked_for():
    values, slot_idx, weights, _ = random_inputs(4, 3, 6, 5)
    from midus import MidusError

    with pytest.raises(MidusError, match="one weight"):
        weighted_gather(values, slot_idx, weights[:, :2])


@pytest.mark.skipif(not HAS_CUDA, reason="the interpreter runs one program after the other")
def test_a_hot_row_of_a_whole_batch_is_reproducible():
    inputs = random_inputs(65_536, 4, 4096, 128, torch.bfloat16, spread=3)
    first, second = (check(*inputs, ERROR[torch.bfloat16])[0] for _ in range(2))
    assert torch.equal(first, second)

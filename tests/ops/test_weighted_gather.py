import torch

from midus.ops import weighted_gather


def random_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 5, generator=generator).to(dtype)
    slot_idx = torch.randint(0, 6, (2, 3, 4), generator=generator)
    slot_idx[0, 0] = 2  # one query that chose a slot four times
    weights = torch.randn(2, 3, 4, generator=generator).to(dtype)
    return values, slot_idx, weights


def one_by_one(values, slot_idx, weights):
    out = torch.zeros(*slot_idx.shape[:-1], values.shape[1], dtype=weights.dtype)
    for where in torch.cartesian_prod(*(torch.arange(n) for n in slot_idx.shape)).tolist():
        *query, _ = where
        out[tuple(query)] += weights[tuple(where)] * values[slot_idx[tuple(where)]]
    return out


def test_sums_the_weighted_rows():
    inputs = random_inputs()
    torch.testing.assert_close(weighted_gather(*inputs), one_by_one(*inputs))


def test_gradients_match_finite_differences_with_repeated_slots():
    values, slot_idx, weights = random_inputs(torch.float64)
    values.requires_grad_()
    weights.requires_grad_()
    assert torch.autograd.gradcheck(lambda v, w: weighted_gather(v, slot_idx, w), (values, weights))


def test_table_gradient_is_reproducible():
    values, slot_idx, weights = random_inputs()
    slot_idx = slot_idx.expand(64, 2, 3, 4)
    grads = []
    for _ in range(3):
        table = values.clone().requires_grad_()
        weighted_gather(table, slot_idx, weights.expand(64, 2, 3, 4)).square().sum().backward()
        grads.append(table.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_bfloat16_tables_are_summed_in_the_type_of_the_weights():
    values, slot_idx, weights = random_inputs()
    out = weighted_gather(values.bfloat16(), slot_idx, weights)
    assert out.dtype == torch.bfloat16
    exact = one_by_one(values.bfloat16().float(), slot_idx, weights)
    assert torch.equal(out, exact.bfloat16())


def test_float64_tables_are_summed_in_float64():
    values, slot_idx, weights = random_inputs()
    values = values.double() / 3
    out = weighted_gather(values, slot_idx, weights)
    assert torch.equal(out, weighted_gather(values, slot_idx, weights.double()))

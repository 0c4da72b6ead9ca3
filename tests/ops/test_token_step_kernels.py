"""One token through a memory block, and rotary embeddings: kernels against plain PyTorch."""

import pytest
import torch
import triton_on_cpu  # noqa: F401  # before Triton
from triton_on_cpu import DEVICE

from midus.errors import MidusError
from midus.ops import (
    attend_and_read,
    attend_token,
    gate_token,
    gated,
    linear_token,
    project_token,
    rotate_heads,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}


def close(actual, expected, dtype):
    distance = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert distance < TOLERANCE[dtype], distance


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("angles", [torch.float32, None])
@pytest.mark.parametrize(("batch", "tables"), [(1, 1), (2, 1), (2, 2)])
def test_rotation_is_as_close_to_exact_as_plain_pytorch(dtype, angles, batch, tables):
    torch.manual_seed(0)
    # Three heads of twelve: neither is a power of two. Views, as projections give them.
    q = draw(batch, 5, 3 * 12, dtype=dtype).unflatten(-1, (3, 12))
    k = draw(batch, 5, 24, dtype=dtype)[..., :12].unflatten(-1, (1, 12))
    cos, sin = (draw(tables, 5, 12, dtype=angles or dtype) for _ in range(2))
    exact = rotate_heads(*(t.double() for t in (q, k, cos, sin)), backend="reference")
    for backend in ("triton", "reference"):
        for a, b in zip(rotate_heads(q, k, cos, sin, backend=backend), exact, strict=True):
            close(a, b, dtype)
            assert a.dtype == (dtype if backend == "triton" else angles or dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "tables"), [(1, 1), (2, 1), (2, 2)])
def test_rotation_equals_plain_pytorch_to_the_bit(dtype, batch, tables):
    torch.manual_seed(0)
    q = draw(batch, 5, 3 * 12, dtype=dtype).unflatten(-1, (3, 12))
    k = draw(batch, 5, 24, dtype=dtype)[..., :12].unflatten(-1, (1, 12))
    cos, sin = draw(tables, 5, 12, dtype=dtype), draw(tables, 5, 12, dtype=dtype)
    expected = rotate_heads(q, k, cos, sin, backend="reference")
    for a, b in zip(rotate_heads(q, k, cos, sin, backend="triton"), expected, strict=True):
        assert torch.equal(a, b)


def test_the_gradient_of_the_rotation_is_the_references():
    torch.manual_seed(1)
    q, k = draw(2, 3, 4, 8), draw(2, 3, 2, 8)
    cos, sin = draw(1, 3, 8), draw(1, 3, 8)
    # Gradients come transposed, as attention hands them back.
    grads = [draw(2, h, 3, 8).transpose(1, 2) for h in (4, 2)]
    found = []
    for backend in ("triton", "reference"):
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        out = rotate_heads(*leaves, cos, sin, backend=backend)
        found.append(torch.autograd.grad(out, leaves, grads))
    for a, b in zip(*found, strict=True):
        close(a, b, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("slot", [0, 3])
def test_projection_fills_one_slot_and_gives_the_queries(dtype, has_bias, slot, is_tensor):
    torch.manual_seed(2)
    hidden_size, width, heads, kv_heads = 20, 12, 3, 2
    hidden, norm = draw(hidden_size, dtype=dtype), draw(hidden_size, dtype=dtype)
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    weights = tuple(draw(size, hidden_size, dtype=dtype, scale=0.2) for size in sizes)
    biases = tuple(draw(size, dtype=dtype) if has_bias else None for size in sizes)
    cos, sin = draw(width, dtype=dtype), draw(width, dtype=dtype)
    length = 2 * slot + 1
    position = torch.tensor(slot, device=DEVICE) if is_tensor else slot
    results = []
    for backend in ("triton", "reference"):
        empty = torch.full((1, kv_heads, length, width), 7.0, dtype=dtype, device=DEVICE)
        cache = [empty.clone(), empty.clone()]
        queries = project_token(
            hidden, norm, 1e-5, weights, biases, cos, sin, *cache, position, backend=backend
        )
        results.append((queries, *cache))
    for a, b in zip(*results, strict=True):
        close(a, b, dtype)
    others = [i for i in range(length) if i != slot]
    for cache in results[0][1:]:
        assert (cache[:, :, others] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [1, 37, 150])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_attention_over_the_cache_is_exact_attention(dtype, slots, is_tensor):
    torch.manual_seed(3)
    batch, heads, kv_heads, width = 2, 6, 2, 12
    q = draw(batch, heads, width, dtype=dtype)
    k, v = (draw(batch, kv_heads, slots, width, dtype=dtype) for _ in range(2))
    used = max(1, slots - 20)
    mask = torch.ones(batch, slots, dtype=torch.bool, device=DEVICE)
    mask[1, : used // 2] = False
    length = torch.tensor(used - 1, device=DEVICE) if is_tensor else used
    for seen in (None, mask):
        found = attend_token(q, k, v, length, seen, width**-0.5, backend="triton")
        bias = torch.zeros(batch, 1, 1, slots, dtype=torch.float64, device=DEVICE)
        bias[..., used:] = -torch.inf
        if seen is not None:
            bias = bias.masked_fill(~seen[:, None, None], -torch.inf)
        exact = torch.nn.functional.scaled_dot_product_attention(
            q.double().unsqueeze(2), *(t.double().repeat_interleave(3, 1) for t in (k, v)), bias
        )
        close(found, exact.squeeze(2), dtype)
        plain = attend_token(q, k, v, length, seen, width**-0.5, backend="reference")
        close(plain, exact.squeeze(2), dtype)


def test_a_sequence_that_sees_nothing_attends_to_nothing():
    q, k, v = draw(1, 2, 8), draw(1, 1, 40, 8), draw(1, 1, 40, 8)
    mask = torch.zeros(1, 40, dtype=torch.bool, device=DEVICE)
    for backend in ("triton", "reference"):
        assert not attend_token(q, k, v, 40, mask, 1.0, backend=backend).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("search", ["two_stage", "cartesian"])
def test_attention_and_memory_add_the_references_correction(dtype, search):
    torch.manual_seed(4)
    batch, heads, kv_heads, width, n, out_width = 2, 6, 2, 12, 6, 10
    q = draw(batch, heads, width, dtype=dtype, scale=3.0)
    k, v = (draw(batch, kv_heads, 70, width, dtype=dtype) for _ in range(2))
    hidden = draw(batch, heads * out_width, dtype=dtype)
    rows, cols = (draw(heads, n, width // 2, dtype=dtype, scale=4.0) for _ in range(2))
    table = draw(heads, n * n, out_width, dtype=dtype)
    results = []
    for backend in ("triton", "reference"):
        length = torch.tensor(60, device=DEVICE)
        results.append(
            attend_and_read(
                q, k, v, length, None, 0.3, hidden, rows, cols, table, 3, None, backend, search
            )
        )
        assert length == 61
    close(results[0] - hidden, results[1] - hidden, dtype)
    by_number = attend_and_read(
        q, k, v, 61, None, 0.3, hidden, rows, cols, table, 3, None, "triton", search
    )
    assert torch.equal(by_number, results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [2, 33, 150])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_past_is_copied_as_it_is_read(dtype, slots, backend):
    torch.manual_seed(9)
    batch, heads, kv_heads, width, n = 2, 6, 2, 12, 4
    q = draw(batch, heads, width, dtype=dtype)
    whole = [draw(batch, kv_heads, slots, width, dtype=dtype) for _ in range(2)]
    past = tuple(t[:, :, :-1].contiguous() for t in whole)
    hidden = draw(batch, heads * 8, dtype=dtype)
    rows, cols = (draw(heads, n, width // 2, dtype=dtype) for _ in range(2))
    table = draw(heads, n * n, 8, dtype=dtype)
    mask = torch.ones(batch, slots, dtype=torch.bool, device=DEVICE)
    mask[1, : slots // 2] = False  # slots that do not count are copied all the same
    memory = (hidden, rows, cols, table, 2)
    for seen in (None, mask):
        grown = [torch.full_like(t, torch.nan) for t in whole]
        for cached, t in zip(grown, whole, strict=True):
            cached[:, :, -1] = t[:, :, -1]
        found = attend_and_read(q, *grown, slots, seen, 0.3, *memory, past, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(grown, whole, strict=True))
        expected = attend_and_read(q, *whole, slots, seen, 0.3, *memory, backend=backend)
        close(found, expected, dtype)


def test_a_token_keeps_its_shape_and_more_tokens_are_refused():
    q, k, v = draw(2, 2, 8), draw(2, 1, 6, 8), draw(2, 1, 6, 8)
    memory = (draw(2, 4, 4), draw(2, 4, 4), draw(2, 16, 4), 2)
    hidden = draw(2, 8)
    for backend in ("triton", "reference"):
        flat = attend_and_read(q, k, v, 6, None, 1.0, hidden, *memory, backend=backend)
        with_token = attend_and_read(
            q, k, v, 6, None, 1.0, hidden[:, None], *memory, backend=backend
        )
        assert torch.equal(with_token, flat[:, None])
        with pytest.raises(MidusError, match="one token a sequence"):
            attend_and_read(q, k, v, 6, None, 1.0, draw(2, 3, 8), *memory, backend=backend)


def test_a_past_that_kernels_would_misread_is_refused():
    q, k, v = draw(1, 2, 8), draw(1, 1, 6, 8), draw(1, 1, 6, 8)
    memory = (draw(1, 8), draw(2, 4, 4), draw(2, 4, 4), draw(2, 16, 4), 2)
    good = draw(1, 1, 5, 8)
    attend_and_read(q, k, v, 6, None, 1.0, *memory, (good, good), backend="triton")
    for bad in (draw(1, 1, 6, 8), draw(1, 1, 5, 9), good.half(), draw(1, 1, 8, 5).transpose(2, 3)):
        for past in ((good, bad), (bad, good)):
            with pytest.raises(MidusError, match="past"):
                attend_and_read(q, k, v, 6, None, 1.0, *memory, past, backend="triton")
    for length in (5, torch.tensor(5, device=DEVICE)):
        with pytest.raises(MidusError, match="length"):
            attend_and_read(q, k, v, length, None, 1.0, *memory, (good, good), backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_one_token_are_those_of_pytorch(dtype):
    torch.manual_seed(5)
    hidden, norm = draw(1, 1, 20, dtype=dtype), draw(20, dtype=dtype)
    gate, up = draw(30, 20, dtype=dtype), draw(30, 20, dtype=dtype)
    found = gate_token(hidden, norm, 1e-5, gate, up, backend="triton")
    close(found, gate_token(hidden, norm, 1e-5, gate, up, backend="reference"), dtype)
    # Longer than one block of columns.
    inputs, weight = draw(1, 1, 1500, dtype=dtype), draw(20, 1500, dtype=dtype)
    found = linear_token(inputs, weight, hidden, backend="triton")
    exact = hidden.double() + inputs.double() @ weight.double().T
    assert found.shape == hidden.shape
    close(found, exact, dtype)
    close(linear_token(inputs, weight, hidden, backend="reference"), exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_and_its_gradients_are_those_of_pytorch(dtype):
    torch.manual_seed(6)
    gate, up, grad = (draw(3, 7, 11, dtype=dtype, scale=3.0) for _ in range(3))
    exact = [t.double().requires_grad_() for t in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for backend in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (gate, up)]
        out = gated(*leaves, backend=backend)
        close(out, expected, dtype)
        for a, b in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
            close(a, b, dtype)
    if dtype == torch.bfloat16:  # both round the gate before it meets the other
        assert torch.equal(gated(gate, up, backend="triton"), gated(gate, up, backend="reference"))


def test_strided_inputs_are_read_as_they_are():
    torch.manual_seed(8)
    q, k, v = draw(2, 4, 8), draw(2, 2, 9, 8), draw(2, 2, 9, 8)
    hidden = draw(2, 3, 24)[:, 1]
    rows, cols, table = draw(4, 4, 4), draw(4, 4, 4), draw(4, 16, 6)
    mask = draw(2, 9, 2)[..., 0] > 0
    mask[:, 0] = True
    args = (q, k, v, 9, mask, 0.3, hidden, rows, cols, table, 2)
    close(attend_and_read(*args, backend="triton"), attend_and_read(*args, backend="reference"),
          torch.float32)  # fmt: skip
    inputs, residual = draw(1, 1, 10, 2)[..., 0], draw(1, 1, 6, 3)[..., 1]
    weight = draw(6, 10)
    found = linear_token(inputs, weight, residual, backend="triton")
    close(found, linear_token(inputs, weight, residual, backend="reference"), torch.float32)

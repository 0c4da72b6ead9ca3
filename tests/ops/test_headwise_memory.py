import pytest
import torch
from layers import (
    ERROR,
    Layer,
    Shape,
    best_scores,
    error,
    random_layer,
    scores_of,
    with_slots,
)
from triton_on_cpu import DEVICE, HAS_CUDA

from midus import MidusError
from midus.ops import headwise_memory, headwise_memory_cached
from midus.ops.headwise_memory import forward_kernels

NAMES = Layer._fields
SHAPES = [
    Shape(tokens=1, heads=1, query=2, subkeys=8, top_k=1, latent=1, output=1),
    Shape(tokens=5, heads=3, query=10, subkeys=8, top_k=3, latent=5, output=7),
    Shape(tokens=37, heads=9, query=64, subkeys=16, top_k=4, latent=32, output=64),
    Shape(tokens=70, heads=2, query=24, subkeys=40, top_k=7, latent=130, output=140),
    Shape(tokens=17, heads=2, query=128, subkeys=64, top_k=4, latent=128, output=128),
    Shape(tokens=33, heads=9, query=64, subkeys=64, top_k=16, latent=64, output=64),
    Shape(tokens=3, heads=1, query=256, subkeys=512, top_k=32, latent=16, output=20),
]
SMALL = SHAPES[1]

pytestmark = pytest.mark.usefixtures("poisoned")


def cache_of(layer):
    return torch.einsum("nr,hro->hno", layer.latent_values.double(), layer.value_proj.double()).to(
        layer.value_proj.dtype
    )


def run_kernels(layer, top_k, cartesian=False, grad_out=None):
    """Output, slots, weights and, with an output gradient, the five gradients."""
    leaves = Layer(*(tensor.detach().requires_grad_() for tensor in layer))
    search = "cartesian" if cartesian else "two_stage"
    out = headwise_memory(*leaves, top_k, backend="triton", search=search)
    again, slot_idx, weights = torch.ops.midus.headwise_memory(*layer, top_k, cartesian, True)
    assert torch.equal(out, again)
    if grad_out is not None:
        out.backward(grad_out)
    return out.detach(), slot_idx, weights, [leaf.grad for leaf in leaves]


def check_everything(layer, top_k, cartesian, tolerance, seed):
    shape = (*layer.queries.shape[:2], layer.value_proj.shape[2])
    grad_out = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))
    grad_out = grad_out.to(layer.queries.device, layer.value_proj.dtype)
    out, slot_idx, weights, grads = run_kernels(layer, top_k, cartesian, grad_out)
    wide = layer.wide()
    assert all(len(set(row)) == top_k for row in slot_idx.flatten(0, 1).tolist())
    found = scores_of(wide, slot_idx)
    torch.testing.assert_close(found, best_scores(wide, top_k), rtol=1e-5, atol=1e-5)
    assert error(weights, found.softmax(dim=-1)) < 1e-5
    expected = with_slots(wide, slot_idx)
    expected.backward(grad_out.double())
    assert error(out, expected) < tolerance
    for name, grad, leaf in zip(NAMES, grads, wide, strict=True):
        assert grad.dtype == getattr(layer, name).dtype
        # Winners that share a column give it a gradient of zero: rows and columns are one measure.
        if "keys" not in name:
            assert error(grad, leaf.grad) < tolerance, name
    keys = [torch.cat([t[1].double(), t[2].double()]) for t in (grads, [t.grad for t in wide])]
    assert error(*keys) < tolerance
    return out, slot_idx, grads


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in SHAPES),
        # Not the first: errors of single numbers do not average out. The largest is slow in the
        # interpreter, so it runs in one type there.
        *((shape, torch.bfloat16) for shape in (SHAPES[1:] if HAS_CUDA else SHAPES[1:-1])),
    ],
    ids=str,
)
def test_output_and_every_gradient_match_float64(shape, dtype, seed):
    check_everything(random_layer(shape, dtype, seed), shape.top_k, False, ERROR[dtype], seed)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_cartesian_search_matches_float64(shape, seed):
    layer = random_layer(shape, seed=seed)
    check_everything(layer, shape.top_k, True, ERROR[torch.float32], seed)


def test_float16_matches_float64(seed):
    layer = random_layer(SHAPES[2], torch.float16, seed)
    check_everything(layer, 4, False, ERROR[torch.float16], seed)


@pytest.mark.parametrize(
    ("queries", "keys", "values"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_each_input_may_have_its_own_type(queries, keys, values, seed):
    layer = random_layer(SHAPES[2], torch.float32, seed)
    types = (queries, keys, keys, values, values)
    layer = Layer(*(tensor.to(dtype) for tensor, dtype in zip(layer, types, strict=True)))
    check_everything(layer, 4, False, ERROR[torch.bfloat16], seed)


def test_bfloat16_queries_with_float32_keys_lose_nothing_of_the_keys(seed):
    shape = Shape(64, 2, 64, 16, 4, 16, 16)
    layer = random_layer(shape, torch.float32, seed)
    mixed = layer._replace(queries=layer.queries.bfloat16())
    _, slot_idx, weights, _ = run_kernels(mixed, 4)
    exact = mixed._replace(queries=mixed.queries.double()).wide()
    assert error(weights, scores_of(exact, slot_idx).softmax(dim=-1)) < 1e-6


def test_repeated_slots_are_summed(seed):
    # Every query equal: each head's four slots are chosen by all of 150 tokens.
    layer = random_layer(Shape(150, 3, 8, 8, 4, 20, 6), seed=seed)
    layer = layer._replace(queries=layer.queries[:1].expand_as(layer.queries).contiguous())
    _, slot_idx, _ = check_everything(layer, 4, False, ERROR[torch.float32], seed)
    assert len(slot_idx.unique()) <= 12


def test_equal_scores_go_to_the_lowest_slot_as_in_the_reference(seed):
    layer = random_layer(Shape(9, 2, 8, 8, 4, 6, 6), seed=seed)
    row_keys, col_keys = layer.row_keys.clone(), layer.col_keys.clone()
    row_keys[:, 1:4] = row_keys[:, :1]
    col_keys[:, 5:8] = col_keys[:, 4:5]
    layer = layer._replace(row_keys=row_keys, col_keys=col_keys)
    out, slot_idx, _ = check_everything(layer, 4, False, ERROR[torch.float32], seed)
    assert error(headwise_memory(*layer, 4, backend="reference"), out) < ERROR[torch.float32]
    from midus.ops import product_key_topk

    expected, _ = product_key_topk(*layer[:3], 4, backend="reference")
    assert torch.equal(slot_idx.long(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("search", ["two_stage", "cartesian"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_cached_values_equal_the_plain_path(dtype, search, backend, seed):
    layer = random_layer(SHAPES[2], dtype, seed)
    cache = cache_of(layer)
    plain = headwise_memory(*layer, 4, backend="reference")
    cached = headwise_memory_cached(*layer[:3], cache, 4, backend=backend, search=search)
    assert cached.dtype == dtype
    assert error(cached, plain) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_large_scores_do_not_overflow(seed):
    layer = random_layer(SMALL, seed=seed)
    layer = layer._replace(row_keys=layer.row_keys * 300)
    out, slot_idx, _, _ = run_kernels(layer, 3)
    assert error(out, with_slots(layer.wide(), slot_idx)) < 1e-4  # scores in the hundreds, rounded


def test_small_gradients_of_float16_queries_are_kept(seed):
    layer = random_layer(SHAPES[2], seed=seed)
    layer = layer._replace(queries=layer.queries.half())
    leaves = Layer(*(tensor.detach().requires_grad_() for tensor in layer))
    grad_out = torch.randn(37, 9, 64, device=DEVICE) * 1e-9
    headwise_memory(*leaves, 4, backend="triton").backward(grad_out)
    wide = layer.wide()
    slot_idx = torch.ops.midus.headwise_memory(*layer, 4, False, True)[1]
    with_slots(wide, slot_idx).backward(grad_out.double())
    assert error(leaves.row_keys.grad, wide.row_keys.grad) < ERROR[torch.float16]


@pytest.mark.parametrize("frozen", [{0}, {3}, {1, 2, 4}, {0, 1, 2, 4}, {1, 2, 3, 4}])
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("tokens", [5, 0])
def test_frozen_inputs_get_no_gradient_and_the_others_theirs(frozen, registered, tokens):
    layer = random_layer(SMALL)
    layer = layer._replace(queries=layer.queries[:tokens])

    def run(frozen):
        leaves = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(layer)]
        if registered:
            out = torch.ops.midus.headwise_memory(*leaves, 3, False, True)[0]
        else:
            out = headwise_memory(*leaves, 3, backend="triton")
        out.sum().backward()
        return [leaf.grad for leaf in leaves]

    for i, (some, every) in enumerate(zip(run(frozen), run(set()), strict=True)):
        assert (some is None) if i in frozen else torch.equal(some, every)


def test_second_derivatives_are_refused():
    layer = [tensor.requires_grad_() for tensor in random_layer(SMALL)]
    out = headwise_memory(*layer, 3, backend="triton").square().sum()
    (grad,) = torch.autograd.grad(out, layer[3], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|second derivative"):
        grad.sum().backward()


def test_the_cached_kernel_refuses_a_gradient():
    layer = random_layer(SMALL)
    cache = cache_of(layer).requires_grad_()
    out = headwise_memory_cached(*layer[:3], cache, 3, backend="triton")
    with pytest.raises(RuntimeError, match="no gradient"):
        out.sum().backward()


def test_nothing_is_saved_without_gradients(monkeypatch):
    saved = []
    real = forward_kernels.headwise_memory_forward
    monkeypatch.setattr(
        forward_kernels,
        "headwise_memory_forward",
        lambda *args: saved.append(args[-1]) or real(*args),
    )
    layer = [tensor.requires_grad_() for tensor in random_layer(SMALL)]
    with torch.no_grad():
        headwise_memory(*layer, 3, backend="triton")
    assert saved == [False]


@pytest.mark.parametrize(
    ("tokens", "subkeys", "search", "expected"),
    [
        (4, 64, "auto", True),
        (5, 64, "auto", False),
        (1, 65, "auto", False),
        (5, 64, "cartesian", True),
        (1, 8, "two_stage", False),
    ],
)
def test_the_search_is_chosen_by_size(tokens, subkeys, search, expected):
    from midus.ops.memory_ops import _use_cartesian

    queries, keys = torch.empty(tokens, 1, 2, 4), torch.empty(2, subkeys, 2)
    assert _use_cartesian(search, queries, keys, use_triton=True) == expected
    assert _use_cartesian(search, queries, keys, use_triton=False) == (search == "cartesian")


def test_registered_gradient_is_the_eager_one():
    layer = random_layer(SMALL)
    grad_out = torch.randn(5, 3, 7).to(DEVICE)
    leaves = [tensor.detach().requires_grad_() for tensor in layer]
    torch.ops.midus.headwise_memory(*leaves, 3, False, True)[0].backward(grad_out)
    eager = run_kernels(layer, 3, grad_out=grad_out)[3]
    assert all(torch.equal(a.grad, b) for a, b in zip(leaves, eager, strict=True))


def test_backward_is_the_same_to_the_bit():
    layer = random_layer(Shape(100, 3, 8, 8, 4, 20, 6))
    grad_out = torch.randn(100, 3, 6).to(DEVICE)
    first, second = (run_kernels(layer, 4, grad_out=grad_out)[3] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_leading_dimensions_and_strides_do_not_matter(backend, seed):
    layer = random_layer(Shape(12, 3, 8, 8, 2, 4, 4), seed=seed)
    flat = headwise_memory(*layer, 2, backend=backend)
    shaped = headwise_memory(layer.queries.view(2, 6, 3, 8), *layer[1:], 2, backend=backend)
    assert torch.equal(shaped.view_as(flat), flat)
    strided = layer.queries.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    # Slots may not differ; the last bits of a product may.
    assert error(headwise_memory(strided, *layer[1:], 2, backend=backend), flat) < 1e-6
    every_other = torch.stack([layer.queries, layer.queries], dim=-1)[..., 0]
    assert every_other.stride(-1) == 2
    assert error(headwise_memory(every_other, *layer[1:], 2, backend=backend), flat) < 1e-6


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_strided_inputs_have_the_gradients_of_contiguous_ones(backend, seed):
    layer = random_layer(Shape(12, 3, 8, 8, 2, 4, 4), seed=seed)
    strided = [torch.stack([t, t], dim=-1)[..., 0].requires_grad_() for t in layer]
    plain = [tensor.clone().requires_grad_() for tensor in layer]
    for inputs in (strided, plain):
        headwise_memory(*inputs, 2, backend=backend).square().sum().backward()
    assert all(error(a.grad, b.grad) < 1e-6 for a, b in zip(strided, plain, strict=True))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_no_tokens_give_no_output_and_zero_gradients(backend, lead):
    layer = random_layer(SMALL)
    leaves = [
        t.detach().requires_grad_() for t in (layer.queries.new_empty(*lead, 3, 10), *layer[1:])
    ]
    out = headwise_memory(*leaves, 3, backend=backend)
    assert out.shape == (*lead, 3, 7)
    out.sum().backward()
    assert all(not leaf.grad.any() for leaf in leaves)
    cached = headwise_memory_cached(*leaves[:3], cache_of(layer), 3, backend=backend)
    assert cached.shape == (*lead, 3, 7)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("where", ["queries", "row_keys", "col_keys"])
def test_nan_is_not_hidden(backend, where):
    layer = random_layer(SMALL)
    spoilt = getattr(layer, where).clone()
    spoilt[0, 0, 0] = torch.nan
    out = headwise_memory(*layer._replace(**{where: spoilt}), 3, backend=backend)
    assert out.isnan().any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_autocast_rounds_the_values_and_not_the_selection(backend, seed):
    layer = random_layer(SHAPES[2], seed=seed)
    leaves = [tensor.requires_grad_() for tensor in layer]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = headwise_memory(*leaves, 4, backend=backend)
    assert out.dtype == torch.bfloat16
    plain = headwise_memory(*layer, 4, backend="reference")
    # Another slot would be an error of order one in its row.
    rows = (out - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert rows.max() < 0.05
    out.float().square().sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)


def test_backends_are_chosen_by_device_and_type(monkeypatch):
    from midus.ops import dispatch

    calls = []
    real = forward_kernels.headwise_memory_forward
    monkeypatch.setattr(
        forward_kernels, "headwise_memory_forward", lambda *args: calls.append(1) or real(*args)
    )
    layer = random_layer(SMALL)
    headwise_memory(*layer, 3)
    assert bool(calls) == HAS_CUDA
    calls.clear()
    wide = [tensor.double() for tensor in layer]
    assert headwise_memory(*wide, 3).dtype == torch.float64
    assert not calls
    monkeypatch.setattr(dispatch, "_HAS_TRITON", False)
    headwise_memory(*layer, 3)
    assert not calls
    with pytest.raises(MidusError, match="install midus"):
        headwise_memory(*layer, 3, backend="triton")


def test_wrong_choices_are_refused_in_a_sentence(monkeypatch):
    layer = random_layer(SMALL, device="cpu")
    with pytest.raises(MidusError, match="choose auto, reference or triton"):
        headwise_memory(*layer, 3, backend="cuda")
    with pytest.raises(MidusError, match="choose auto, two_stage or cartesian"):
        headwise_memory(*layer, 3, search="flat")
    wide = random_layer(SMALL._replace(subkeys=129))
    with pytest.raises(MidusError, match="use search='two_stage'"):
        headwise_memory(*wide, 3, backend="triton", search="cartesian")
    with pytest.raises(MidusError, match="float64"):
        headwise_memory(*(t.double() for t in layer), 3, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(MidusError, match="tensors on cpu"):
        headwise_memory(*layer, 3, backend="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": (5, 2, 10)}, "row_keys has shape"),
        ({"queries": (5, 3, 11)}, "even width"),
        ({"row_keys": (3, 8, 4)}, "row_keys has shape"),
        ({"col_keys": (3, 9, 5)}, "col_keys has shape"),
        ({"latent_values": (63, 5)}, "latent_values has shape"),
        ({"value_proj": (2, 5, 7)}, "value_proj has shape"),
        ({"value_proj": (3, 4, 7)}, "latent_values has shape"),
        ({"value_proj": (3, 5)}, "value_proj has shape"),
        ({"queries": (10,)}, "expected"),
        ({"row_keys": (8, 5)}, "expected"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    layer = random_layer(SMALL)
    (name, shape), *_ = change.items()
    layer = layer._replace(**{name: torch.randn(shape, device=DEVICE)})
    with pytest.raises(MidusError, match=message):
        headwise_memory(*layer, 3)


@pytest.mark.parametrize("shape", [(3, 63, 7), (2, 64, 7), (64, 7)])
def test_a_cache_that_does_not_fit_is_refused(shape):
    with pytest.raises(MidusError, match="value_cache has shape"):
        headwise_memory_cached(*random_layer(SMALL)[:3], torch.zeros(shape, device=DEVICE), 3)


def test_searches_too_large_for_the_kernels_take_the_reference():
    layer = random_layer(Shape(2, 1, 4, 40, 33, 2, 2))
    assert headwise_memory(*layer, 33).shape == (2, 1, 2)
    with pytest.raises(MidusError, match="use backend='reference'"):
        headwise_memory(*layer, 33, backend="triton")


@pytest.mark.parametrize("top_k", [0, 9])
def test_top_k_must_fit_the_subkeys(top_k):
    with pytest.raises(MidusError, match=f"top_k={top_k}"):
        headwise_memory(*random_layer(SMALL), top_k)


@pytest.mark.parametrize("name", ["headwise_memory", "headwise_memory_cached"])
def test_operators_hold_what_torch_library_asks_of_them(name):
    layer = random_layer(Shape(4, 2, 8, 8, 2, 4, 6))
    if name == "headwise_memory":
        args = (*(t.requires_grad_() for t in layer), 2, False, True)
    else:
        args = (*layer[:3], cache_of(layer), 2, False)
    torch.library.opcheck(
        getattr(torch.ops.midus, name).default,
        args,
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )


def test_compiles_as_one_graph_and_gives_the_same():
    layer = random_layer(Shape(6, 2, 8, 8, 2, 4, 6))

    def run(compiled):
        leaves = [tensor.detach().requires_grad_() for tensor in layer]
        layer_function = torch.compile(headwise_memory, fullgraph=True, backend="aot_eager")
        function = layer_function if compiled else headwise_memory
        function(*leaves, 2, backend="triton").square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for a, b in zip(run(True), run(False), strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    from torch.utils.checkpoint import checkpoint

    layer = random_layer(Shape(6, 2, 8, 8, 2, 4, 6))

    def run(wrap):
        leaves = [tensor.detach().requires_grad_() for tensor in layer]
        call = lambda *tensors: headwise_memory(*tensors, 2, backend="triton")  # noqa: E731
        out = checkpoint(call, *leaves, use_reentrant=reentrant) if wrap else call(*leaves)
        out.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_backward_saves_only_slots_and_weights_besides_the_inputs():
    layer = [tensor.requires_grad_() for tensor in random_layer(SHAPES[2])]
    inputs = {tensor.data_ptr() for tensor in layer}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        headwise_memory(*layer, 4, backend="triton")
    own = [(t.dtype, t.numel()) for t in saved if t.data_ptr() not in inputs]
    entries = 37 * 9 * 4
    assert sorted(own, key=str) == [(torch.float32, entries), (torch.int32, entries)]

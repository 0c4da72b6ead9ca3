"""RMSNorm of a stream by kernels, against the reference and against transformers' own."""

import pytest
import torch
from layers import ERROR, error
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from triton_on_cpu import DEVICE

from midus.ops import rms_norm
from midus.ops.rms_norm import kernels

EPS = 1e-5
# Types of the stream, the weight, what is added, and the norm.
SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
TYPES = {
    "float32": (SINGLE, SINGLE, SINGLE, SINGLE),
    "bfloat16": (BRAIN, BRAIN, BRAIN, BRAIN),
    "float16": (HALF, HALF, HALF, HALF),
    "autocast": (SINGLE, SINGLE, BRAIN, BRAIN),
    "autocast, frozen base": (BRAIN, SINGLE, BRAIN, BRAIN),
    "autocast, wide stream": (SINGLE, BRAIN, BRAIN, BRAIN),
}
every_type = pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
every_width = pytest.mark.parametrize("shape", [(3, 5, 576), (7, 100), (1, 3, 4096), (2, 1), (33,)])


def draw(shape, dtype, seed, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_(grad)


def inputs(shape, types, has_added):
    stream, weight, added, _ = types
    return (
        draw(shape, stream, 0),
        draw(shape[-1:], weight, 1),
        draw(shape, added, 2) if has_added else None,
    )


def run(tensors, types, num_readers, grads, backend="triton"):
    """Outputs, and gradients of the inputs, each output with a gradient of its own."""
    hidden, weight, added = tensors
    out = rms_norm(hidden, weight, EPS, added, types[3], num_readers, backend=backend)
    given = [t for t in tensors if t is not None]
    return out, torch.autograd.grad(out, given, grads)


def exact(tensors, types, num_readers, grads):
    """The same in float64 on the same inputs; sums in the stream's type are rounded to it."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    out, found = run(wide, (*types[:3], torch.float64), num_readers, grads, "reference")
    return out, found


def grads_of(shape, types, num_readers):
    kinds = [types[0], *[types[3]] * num_readers]
    return [draw(shape, kind, 10 + i, grad=False) for i, kind in enumerate(kinds)]


@pytest.mark.usefixtures("poisoned")
@every_type
@every_width
@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize("num_readers", [1, 3])
def test_outputs_and_gradients_are_the_references(types, shape, has_added, num_readers):
    tensors, grads = inputs(shape, types, has_added), grads_of(shape, types, num_readers)
    out, found = run(tensors, types, num_readers, grads)
    # A sum in 16 bits is rounded before it is normed: there float64 would see another stream.
    plain, _ = run(tensors, types, num_readers, grads, "reference")
    assert len(out) == 1 + num_readers
    assert torch.equal(out[0], plain[0])
    for ours, theirs in zip(out[1:], plain[1:], strict=True):
        assert ours.dtype == theirs.dtype == types[3]
        assert error(ours, theirs) < (1e-6 if types[3] == SINGLE else 1e-3)
    wide = [grad.double() for grad in grads]
    _, expected = exact(tensors, types, num_readers, wide)
    given = [tensor for tensor in tensors if tensor is not None]
    for tensor, ours, theirs in zip(given, found, expected, strict=True):
        assert ours.dtype == tensor.dtype
        tolerance = max(ERROR[tensor.dtype], ERROR[types[0]])
        assert error(ours, theirs) < tolerance


@every_type
def test_it_is_the_norm_of_transformers_after_the_readers_cast(types):
    hidden, weight, _ = inputs((5, 576), types, False)
    norm = LlamaRMSNorm(576, EPS).to(DEVICE)
    norm.weight = torch.nn.Parameter(weight.detach())
    expected = norm(hidden).to(types[3])
    _, normed = rms_norm(hidden, weight, EPS, dtype=types[3], backend="triton")
    # Sums of squares in another order may turn a last bit, one in a hundred at most.
    assert (normed != expected).float().mean() < (0.5 if types[3] == SINGLE else 0.01)
    torch.testing.assert_close(normed, expected, rtol=2**-6 if types[3] != SINGLE else 1e-6, atol=0)
    _, by_default = rms_norm(hidden, weight, EPS, backend="triton")
    assert by_default.dtype == norm(hidden).dtype


@pytest.mark.parametrize("num_rows", [0, 1, 2, 63, 64, 65, 200])
def test_the_weights_gradient_is_summed_over_all_rows(num_rows, monkeypatch):
    monkeypatch.setattr(kernels, "_PROGRAMS", 16)  # so that each has several rows
    types = TYPES["float32"]
    tensors, grads = inputs((num_rows, 36), types, True), grads_of((num_rows, 36), types, 2)
    _, found = run(tensors, types, 2, grads)
    _, expected = exact(tensors, types, 2, [grad.double() for grad in grads])
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < ERROR[SINGLE]
    _, again = run(tensors, types, 2, grads)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_rows_may_lie_apart():
    types = TYPES["float32"]
    for make in (
        lambda t: t[..., :30],  # rows of a wider matrix
        lambda t: t.transpose(0, 1),  # no one stride between rows
        lambda t: t[:, ::2],
        lambda t: t.transpose(-1, -2),  # rows that are columns
        lambda t: t[:1].expand(4, -1, -1),
    ):
        hidden = make(draw((4, 6, 40), SINGLE, 0, grad=False)).detach().requires_grad_()
        added = make(draw((4, 6, 40), SINGLE, 2, grad=False)).detach().requires_grad_()
        weight = draw(hidden.shape[-1:], SINGLE, 1)
        grads = grads_of(hidden.shape, types, 1)
        grads[1] = grads[1].sum(-1, keepdim=True).expand_as(grads[1])
        for tensors in ((hidden, weight, added), (hidden, weight, None)):
            out, found = run(tensors, types, 1, grads)
            plain, expected = run(tensors, types, 1, grads, "reference")
            for a, b in zip((*out, *found), (*plain, *expected), strict=True):
                assert error(a, b) < ERROR[SINGLE]


@pytest.mark.parametrize("wants", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_only_what_wants_a_gradient_gets_one(wants):
    types = TYPES["autocast"]
    tensors = inputs((4, 20), types, True)
    for tensor, wanted in zip(tensors, wants, strict=True):
        tensor.requires_grad_(bool(wanted))
    stream, *readers = rms_norm(*tensors[:2], EPS, tensors[2], BRAIN, 2, backend="triton")
    assert stream.requires_grad == bool(wants[0] or wants[2])
    total = sum(reader.float().square().sum() for reader in readers)
    if stream.requires_grad:
        total = total + stream.sum()
    total.backward()
    found = [tensor.grad for tensor in tensors]
    assert [grad is not None for grad in found] == [bool(wanted) for wanted in wants]
    assert all(grad is None or grad.abs().max() > 0 for grad in found)


def test_outputs_that_nobody_reads_have_no_part_in_gradients():
    hidden, weight, added = inputs((4, 20), TYPES["autocast"], True)
    other = [t.detach().clone().requires_grad_() for t in (hidden, weight, added)]

    def grads(tensors, pick, backend):
        out = rms_norm(*tensors[:2], EPS, tensors[2], BRAIN, 3, backend=backend)
        loss = sum((out[i].float() ** 2).sum() for i in pick)
        return torch.autograd.grad(loss, tensors, allow_unused=True)

    for pick in ([0], [2], [0, 3], [1, 2, 3]):
        ours = grads((hidden, weight, added), pick, "triton")
        theirs = grads(other, pick, "reference")
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or error(a, b) < ERROR[BRAIN]


def test_the_stream_and_a_number_a_row_are_all_that_is_kept():
    hidden, weight, added = inputs((8, 64), TYPES["autocast"], True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        stream, first, second = rms_norm(hidden, weight, EPS, added, BRAIN, 2, backend="triton")
    places = {t.untyped_storage().data_ptr(): t.numel() for t in kept}
    assert places.pop(stream.untyped_storage().data_ptr()) == 8 * 64
    assert places.pop(weight.untyped_storage().data_ptr()) == 64
    assert list(places.values()) == [8]
    assert first.data_ptr() == second.data_ptr()


def test_without_gradients_the_outputs_are_the_same():
    hidden, weight, added = inputs((5, 100), TYPES["autocast"], True)
    expected = rms_norm(hidden, weight, EPS, added, BRAIN, 2, backend="triton")
    with torch.no_grad():
        out = rms_norm(hidden, weight, EPS, added, BRAIN, 2, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    assert not any(tensor.requires_grad for tensor in out)


@pytest.mark.parametrize("changed", ["readers", "width", "types"])
def test_what_the_kernels_do_not_take_the_reference_does(changed, monkeypatch):
    def refuse(*args):
        raise AssertionError("kernels were called")

    monkeypatch.setattr(kernels, "rms_norm_forward", refuse)
    width = 16_385 if changed == "width" else 8
    hidden, weight = draw((2, width), BRAIN, 0), draw((width,), BRAIN, 1)
    added = draw((2, width), SINGLE if changed == "types" else BRAIN, 2)
    readers = 5 if changed == "readers" else 2
    out = rms_norm(hidden, weight, EPS, added, None, readers, backend="triton")
    assert len(out) == 1 + readers
    assert out[0].dtype == (SINGLE if changed == "types" else BRAIN)

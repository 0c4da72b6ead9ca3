"""Cross-entropy with its gradient over the logits, against float64."""

import pytest
import torch
import torch.nn.functional as F
from triton_on_cpu import DEVICE

from midus.ops import cross_entropy_
from midus.ops.cross_entropy import kernels

IGNORED = -100


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 64, 300])
def test_loss_and_gradient_are_those_of_pytorch(backend, dtype, width, monkeypatch):
    monkeypatch.setattr(kernels, "_BLOCK", 128)  # so that a row takes several
    torch.manual_seed(0)
    # Rows of one matrix with more columns: not contiguous as a whole.
    logits = (torch.randn(5, width + 9, device=DEVICE) * 5).to(dtype)[:, :width]
    targets = torch.randint(0, width, (5,), device=DEVICE)
    targets[2] = IGNORED
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="sum")
    (grad,) = torch.autograd.grad(expected, exact)
    loss = cross_entropy_(logits, targets, IGNORED, backend=backend)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(logits.double(), grad, rtol=tolerance, atol=1e-7)
    assert not logits[2].any()


def test_words_that_are_ruled_out_change_nothing():
    logits = torch.tensor([[0.5, -torch.inf, 1.5, -torch.inf]], device=DEVICE)
    target = torch.tensor([2], device=DEVICE)
    expected = F.cross_entropy(logits[:, ::2], torch.tensor([1], device=DEVICE))
    loss = cross_entropy_(logits, target, IGNORED, backend="triton")
    torch.testing.assert_close(loss, expected)
    assert logits[0, 1] == logits[0, 3] == 0


def test_nothing_is_an_empty_sum():
    empty = torch.zeros(0, 8, device=DEVICE)
    assert cross_entropy_(empty, empty.new_zeros(0, dtype=torch.long), IGNORED, "triton") == 0


@pytest.mark.parametrize("target", [7, -1])
def test_a_word_that_is_not_there_makes_the_loss_nan(target):
    logits = torch.randn(3, 7, device=DEVICE)
    targets = torch.tensor([2, target, 3], device=DEVICE)
    assert cross_entropy_(logits, targets, IGNORED, backend="triton").isnan()

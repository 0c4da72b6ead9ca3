"""The chunked loss is the plain one, and never holds all logits."""

import pytest
import torch
import torch.nn.functional as F
from tiny import VOCAB, every_family, grown, prompt_ids
from torch.utils._python_dispatch import TorchDispatchMode

from midus.training.loss import IGNORED, linear_cross_entropy, use_chunked_loss


def inputs(num_tokens=11, width=6, vocabulary=19, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    targets[[0, 4, 10]] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden, weight, targets, softcap=None):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_loss_and_gradients_are_the_plain_ones(chunk, softcap):
    ours, theirs = inputs(), inputs()
    # Scaled, so that a backward pass that forgets what comes from above is found out.
    (3 * linear_cross_entropy(*ours, chunk, softcap)).backward()
    (3 * plain(*theirs, softcap)).backward()
    expected = plain(*theirs, softcap)
    torch.testing.assert_close(linear_cross_entropy(*ours, chunk, softcap), expected)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    torch.testing.assert_close(ours[1].grad, theirs[1].grad)


def test_no_tokens_to_predict_cost_nothing():
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED), 4)
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()


def test_frozen_head_gets_no_gradient():
    hidden, weight, targets = inputs()
    linear_cross_entropy(hidden, weight.detach(), targets, 4).backward()
    assert hidden.grad.abs().sum() > 0


@every_family
def test_model_with_chunked_loss_equals_itself(family):
    model = grown(family).double()
    ids = prompt_ids(batch=2)
    labels = ids.clone()
    labels[0, :5] = IGNORED
    logits = model(input_ids=ids).logits
    # transformers' own loss is float32's.
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    use_chunked_loss(model, 5)
    actual = model(input_ids=ids, labels=labels)
    actual.loss.backward()
    assert actual.logits is None
    torch.testing.assert_close(actual.loss, expected)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, grads[name], msg=name)
    assert torch.equal(model(input_ids=ids).logits, logits)  # without labels as before


def test_given_number_of_items_divides_the_sum():
    model = grown()
    use_chunked_loss(model, 8)
    ids = prompt_ids()
    mean = model(input_ids=ids, labels=ids).loss
    total = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(1)).loss
    torch.testing.assert_close(total, mean * 11)


class _Largest(TorchDispatchMode):
    """The largest last dimension times rows of any tensor made."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCAB:
                self.rows = max(self.rows, tensor.numel() // VOCAB)
        return out


def test_all_logits_are_never_there():
    model = grown()
    ids = prompt_ids(batch=9)
    with _Largest() as plain_model:
        model(input_ids=ids, labels=ids).loss.backward()
    assert plain_model.rows >= ids.numel()
    use_chunked_loss(model, 4)
    with _Largest() as chunked:
        model(input_ids=ids, labels=ids).loss.backward()
    assert chunked.rows == model.config.hidden_size  # the head itself, transposed

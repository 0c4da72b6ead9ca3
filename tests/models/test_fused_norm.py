"""Fused norms inside whole models: mixed precision as `midus train` has it, with the kernels."""

import copy
import functools

import pytest
import torch
from tiny import fill_tables, prompt_ids, tiny_base
from triton_on_cpu import DEVICE

from midus import MemoryConfig, UpscaleConfig, ops, upscale
from midus.models import fused
from midus.models.fused_base import fuse_blocks
from midus.models.record import set_trainable

METHODS = ["full", "llama_pro", "hml", "bypass"]


def mixed(method):
    """A model whose trained weights are float32 and whose frozen ones are bfloat16."""
    base = tiny_base(num_hidden_layers=2).to(torch.bfloat16)
    if method == "full":
        return base.float().requires_grad_(True).train().to(DEVICE)
    if method == "llama_pro":
        model = upscale(base, UpscaleConfig(method="llama_pro", num_inserted=1))
        for block in model.model.layers:  # copies start as the identity
            torch.nn.init.normal_(block.mlp.down_proj.weight, std=0.3)
            torch.nn.init.normal_(block.self_attn.o_proj.weight, std=0.3)
    else:
        bypass = "stream" if method == "bypass" else "none"
        memory = MemoryConfig(num_subkeys=8, top_k=4, bypass=bypass)
        model = upscale(base, UpscaleConfig(memory=memory, num_inserted=1))
        fill_tables(model, scale=0.3)
    set_trainable(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.train().to(DEVICE)


def gradients(model, autocast=True):
    """Loss and gradients; not those of memories, where rounding may choose other slots."""
    model.zero_grad()
    ids = prompt_ids(2, 9).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model(ids, labels=ids).loss
    loss.backward()
    named = model.named_parameters()
    grads = {n: p.grad.double() for n, p in named if p.grad is not None and ".memory." not in n}
    return loss.double().item(), grads


@pytest.fixture
def calls(monkeypatch):
    """Lets fused blocks and the norm's kernels run on a CPU; what the norm was asked for."""
    asked = []
    monkeypatch.setattr(fused, "_DEVICES", frozenset({DEVICE}))

    def counting(hidden, weight, eps, added, dtype, num_readers):
        asked.append((hidden.dtype, weight.dtype, dtype, num_readers))
        return ops.rms_norm(hidden, weight, eps, added, dtype, num_readers, backend="triton")

    monkeypatch.setattr(fused, "rms_norm", counting)
    rotate_heads = functools.partial(ops.rotate_heads, backend="triton")
    monkeypatch.setattr(fused, "rotate_heads", rotate_heads)
    return asked


def distance(found, exact):
    """Summed over tensors, each relative to its own norm."""
    assert found.keys() == exact.keys()
    return sum(((found[n] - exact[n]).norm() / exact[n].norm()).item() for n in exact)


@pytest.mark.parametrize("method", METHODS)
def test_mixed_precision_has_the_plain_loss_and_gradients(method, calls, monkeypatch):
    model = mixed(method)
    fuse_blocks(model)
    ours = gradients(model)
    blocks = len(model.model.layers)
    assert len(calls) == 2 * blocks - (1 if method in ("hml", "bypass") else 0)
    assert all(dtype == torch.bfloat16 for _, _, dtype, _ in calls)
    weights = {weight for _, weight, _, _ in calls}
    streams = {stream for stream, _, _, _ in calls}
    assert streams == ({torch.float32} if method == "full" else {torch.bfloat16})
    assert weights == {torch.float32} | (set() if method == "full" else {torch.bfloat16})
    monkeypatch.setattr(fused, "_DEVICES", ())
    plain, exact = gradients(model), gradients(copy.deepcopy(model).float(), autocast=False)
    assert ours[0] == pytest.approx(plain[0], rel=2e-3)
    # All of them are off by rounding, ours no more than the others.
    assert distance(ours[1], exact[1]) < 1.2 * distance(plain[1], exact[1])
    assert distance(ours[1], plain[1]) < 1.2 * distance(plain[1], exact[1])


@pytest.mark.parametrize("method", METHODS)
def test_without_autocast_gradients_are_the_plain_ones(method, calls, monkeypatch):
    model = mixed(method).float()
    fuse_blocks(model)
    ours = gradients(model, autocast=False)
    assert calls
    assert all(dtype is None for _, _, dtype, _ in calls)
    monkeypatch.setattr(fused, "_DEVICES", ())
    plain = gradients(model, autocast=False)
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    for name, grad in plain[1].items():
        assert (ours[1][name] - grad).norm() < 1e-5 * grad.norm(), name


@pytest.mark.parametrize("method", ["full", "llama_pro", "hml"])
def test_checkpointing_changes_no_bit(method, calls):
    model = mixed(method)
    fuse_blocks(model)
    expected = gradients(model)
    once = len(calls)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients(model)
    assert len(calls) > 2 * once
    assert again[0] == expected[0]
    assert all(torch.equal(again[1][name], grad) for name, grad in expected[1].items())


def test_a_watched_reader_gets_what_the_plain_norm_gives(calls):
    model, seen = mixed("full"), []
    fuse_blocks(model)
    linear = model.model.layers[0].self_attn.k_proj
    linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    gradients(model)
    assert seen == [torch.float32]
    assert [dtype for _, _, dtype, _ in calls] == [None] + [torch.bfloat16] * 3


def test_types_that_differ_without_autocast_take_the_plain_path(calls):
    model = mixed("full").eval()
    fuse_blocks(model)
    for block in model.model.layers:
        block.input_layernorm.to(torch.bfloat16)
    with torch.no_grad():
        model(prompt_ids(1).to(DEVICE))
    assert not calls

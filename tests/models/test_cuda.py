"""The claims of test_modeling.py on a CUDA device: `make test-gpu`."""

import pytest
import torch
from tiny import MEMORY, TOLERANCE, every_family, grown, prompt_ids, relative_error, tiny_base

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.memory import MEMORY_LAYERS

pytestmark = pytest.mark.gpu


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grown_model_starts_as_the_base(family, dtype):
    base = tiny_base(family).to("cuda", dtype)
    model = upscale(base, UpscaleConfig(memory=MEMORY))
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    ids = prompt_ids(2, 20).cuda()
    assert torch.equal(model(ids).logits, base(ids).logits)


@every_family
def test_cached_generation_equals_uncached(family):
    model = grown(family).cuda()
    ids = prompt_ids(2).cuda()
    outputs = [
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=8,
            min_new_tokens=8,
            use_cache=use_cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    logits = [torch.stack(output.logits) for output in outputs]
    assert relative_error(logits[0], logits[1]) < TOLERANCE[torch.float32]


def test_compiled_fullgraph_equals_eager():
    model = grown().cuda()
    ids = prompt_ids(2).cuda()
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
    assert relative_error(compiled, eager) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_every_memory_layer_starts_as_the_base_and_has_the_cpus_gradients(kind):
    memory = MemoryConfig(kind=kind, num_subkeys=8)
    fresh = grown(filled=False, memory=memory).cuda()
    ids = prompt_ids(2)
    assert torch.equal(fresh(ids.cuda()).logits, tiny_base().cuda()(ids.cuda()).logits)
    grads = []
    for device in ("cpu", "cuda"):
        model = grown(memory=memory).to(device)
        model(ids.to(device), labels=ids.to(device), use_cache=False).loss.backward()
        grads.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.requires_grad})
    for name, expected in grads[0].items():
        assert relative_error(grads[1][name], expected) < 1e-3, name


def greedy(model, ids, **options):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=8,
        **options,
    )


def test_generate_builds_value_caches_and_gives_the_same_tokens(monkeypatch):
    from midus.memory import hml

    calls = []
    real = hml.headwise_memory_cached
    monkeypatch.setattr(hml, "headwise_memory_cached", lambda *a: calls.append(1) or real(*a))
    model = grown().cuda()
    ids = prompt_ids(2).cuda()
    with torch.no_grad():
        plain = ids
        for _ in range(8):
            logits = model(plain, use_cache=False).logits[:, -1]
            logits[:, model.config.eos_token_id] = -torch.inf  # as min_new_tokens does
            plain = torch.cat([plain, logits.argmax(-1, keepdim=True)], dim=-1)
    assert not calls
    assert torch.equal(greedy(model, ids), plain)
    assert calls
    # It takes nothing with it, except from a user who built them.
    assert all(values.value_cache is None for values in model._hive_values())
    model.build_value_cache()
    greedy(model, ids)
    assert all(values.value_cache is not None for values in model._hive_values())


def test_static_cache_with_a_compiled_step_gives_the_same_tokens():
    model = grown().cuda()
    ids = prompt_ids(2).cuda()
    assert torch.equal(greedy(model, ids, cache_implementation="static"), greedy(model, ids))


def test_compiled_with_cuda_graphs_equals_eager():
    model = grown().cuda()
    ids = prompt_ids(2).cuda()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        for _ in range(3):
            logits = compiled(ids, use_cache=False).logits.clone()
    assert relative_error(logits, eager) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_gives_the_same_gradients(dtype):
    ids = prompt_ids(2).cuda()
    grads = []
    for is_checkpointed in (False, True):
        model = grown().to("cuda", dtype).train()
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_value_caches_of_a_bfloat16_model_are_close():
    model = grown().to("cuda", torch.bfloat16)
    attended = torch.randn(2, 20, 32, device="cuda", dtype=torch.bfloat16)
    for block in (layer for layer in model.model.layers if hasattr(layer, "memory")):
        with torch.no_grad():
            plain = block.memory(attended)
            block.memory.values.build_cache()
            cached = block.memory(attended)
        assert (cached - plain).float().norm() / plain.float().norm() < 5e-3

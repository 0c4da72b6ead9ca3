"""Switched off, memory blocks leave the base; their caches know in which state they were filled."""

import copy
import pickle
import threading

import pytest
import torch
from tiny import every_bypass, every_family, fill_tables, grown, load, prompt_ids, tiny_base
from transformers import DynamicCache, StaticCache

from midus import MemoryConfig, MidusError, UpscaleConfig, lora_targets, upscale
from midus.memory import MEMORY_LAYERS
from midus.models import fast, fused
from midus.models.fast import FastDecoder, first_difference, generate_fast

GREEDY = {"max_new_tokens": 10, "do_sample": False}


def pair(family="llama", placement="distributed", **memory):
    """A base, and itself grown with filled tables."""
    options = MemoryConfig(num_subkeys=8, top_k=4, **memory)
    base = tiny_base(family)
    model = upscale(base, UpscaleConfig(placement=placement, memory=options)).eval()
    return base, fill_tables(model)


def padded():
    ids = prompt_ids(2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


@every_family
def test_disabled_logits_are_the_bases_bit_for_bit(family):
    base, model = pair(family)
    inputs = padded()
    before = model(**inputs).logits
    for training in (False, True):
        base.train(training)
        model.train(training)
        with model.memory_disabled():
            out = model(**inputs, output_hidden_states=True)
        want = base(**inputs, output_hidden_states=True)
        assert torch.equal(out.logits, want.logits)
        inserted = model.config.memory_positions
        kept = [states for i, states in enumerate(out.hidden_states) if i not in inserted]
        assert all(torch.equal(a, b) for a, b in zip(kept, want.hidden_states, strict=True))
    assert torch.equal(model.eval()(**inputs).logits, before)
    assert not torch.equal(before, want.logits)


@every_family
@pytest.mark.parametrize("placement", ["distributed", "bottom_heavy"])
def test_disabled_generation_is_the_bases(family, placement):
    # 12 tokens and 10 more pass Gemma's window of 8; bottom_heavy begins with a memory block.
    base, model = pair(family, placement)
    for options in ({}, {"cache_implementation": "static"}, {"num_beams": 2}):
        with model.memory_disabled():
            out = model.generate(**padded(), **GREEDY, **options)
        assert torch.equal(out, base.generate(**padded(), **GREEDY, **options)), options


@every_bypass
@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_a_disabled_memory_of_any_kind_is_not_computed(kind, bypass):
    options = {"attention_residual": True, "query_norm": "batch", "bypass": bypass}
    base, model = pair(kind=kind, **options)
    for position in model.config.memory_positions:
        for parameter in model.model.layers[position].parameters():
            parameter.data.fill_(float("nan"))
    with model.train().memory_disabled():
        assert torch.equal(model(prompt_ids()).logits, base(prompt_ids()).logits)


def test_assisted_generation_follows_each_models_own_state():
    base, model = pair()
    assistant = grown(seed=1)
    with model.memory_disabled(), assistant.memory_disabled([1]):
        out = model.generate(prompt_ids(), assistant_model=assistant, **GREEDY)
        looked_up = model.generate(prompt_ids(), prompt_lookup_num_tokens=2, **GREEDY)
    assert torch.equal(out, base.generate(prompt_ids(), **GREEDY))
    assert torch.equal(looked_up, out)
    out = model.generate(prompt_ids(), assistant_model=assistant, **GREEDY)
    assert torch.equal(out, model.generate(prompt_ids(), **GREEDY))


def test_steps_over_a_cache_have_the_bases_logits_and_one_length_in_all_layers():
    base, model = pair(placement="bottom_heavy")
    assert 0 in model.config.memory_positions
    ids = prompt_ids(2, 12)
    made = [
        lambda m: None,
        lambda m: DynamicCache(config=m.config),
        lambda m: StaticCache(config=m.config, max_cache_len=16),
    ]
    for make in made:
        with torch.no_grad(), model.memory_disabled():
            own, cache = make(base), make(model)
            for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:]):
                want = base(part, past_key_values=own, use_cache=True)
                # As a tuple: the cache is marked where it is made, not in what is handed back.
                out = model(part, past_key_values=cache, use_cache=True, return_dict=False)
                assert torch.equal(out[0], want.logits)
                own, cache = want.past_key_values, out[1]
            lengths = {int(cache.get_seq_length(layer)) for layer in range(len(cache.layers))}
            assert lengths == {12}


def test_some_blocks_disabled_leave_the_others():
    _, model = pair()
    first, second = model.config.memory_positions
    inputs = padded()
    with model.memory_disabled([first]):
        assert model.memory_gates == {first: 0.0, second: 1.0}
        out = model(**inputs).logits
    emptied = copy.deepcopy(model)
    emptied.model.layers[first].memory.values.latent_values.data.zero_()
    assert torch.equal(out, emptied(**inputs).logits)


def test_it_nests_and_an_exception_ends_it():
    _, model = pair()
    first, second = model.config.memory_positions
    with model.memory_disabled([first]):
        with model.model.memory_disabled():  # the decoder's is the same
            with model.memory_disabled([first, first]):
                pass
            assert model.memory_gates == {first: 0.0, second: 0.0}
        with pytest.raises(IndexError), model.memory_disabled():
            model(torch.tensor([[1000]]))
        assert model.memory_gates == {first: 0.0, second: 1.0}
    assert model.memory_gates == {first: 1.0, second: 1.0}


def test_states_opened_in_threads_all_end():
    _, model = pair()

    def switch():
        for _ in range(100):
            with model.memory_disabled():
                assert set(model.memory_gates.values()) == {0.0}

    threads = [threading.Thread(target=switch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(model.memory_gates.values()) == {1.0}


@every_bypass
def test_a_gate_scales_the_correction(bypass):
    _, model = pair(bypass=bypass)
    position = model.config.memory_positions[0]
    block, seen = model.model.layers[position], []
    block.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    for gate in (1.0, 0.25, 0.0):
        model.set_memory_gates({position: gate})
        model(prompt_ids())
    (x, whole), (_, quarter), (_, nothing) = seen
    assert torch.equal(nothing, x)
    torch.testing.assert_close(quarter, x + 0.25 * (whole - x))
    assert not torch.equal(quarter, x)


def test_gates_replace_those_before_and_wait_while_disabled():
    base, model = pair()
    first, second = model.config.memory_positions
    whole = model(prompt_ids()).logits
    model.set_memory_gates({first: 0.5})
    with model.memory_disabled():
        model.set_memory_gates({second: 0})
        assert torch.equal(model(prompt_ids()).logits, base(prompt_ids()).logits)
    assert model.memory_gates == {first: 1.0, second: 0.0}
    model.set_memory_gates({})
    assert torch.equal(model(prompt_ids()).logits, whole)


@pytest.mark.parametrize(
    "memory",
    [
        *({"kind": kind} for kind in MEMORY_LAYERS),
        {"values": "shared"},
        {"values": "independent", "bypass": "both", "memory_output_proj": True},
        {"values": "independent", "bypass": "joined"},
    ],
    ids=str,
)
def test_folded_gates_are_in_the_weights_and_in_checkpoints(memory, tmp_path):
    _, model = pair(**memory)
    model.double()
    whole = model(prompt_ids()).logits
    first, second = model.config.memory_positions
    model.set_memory_gates({first: 0.7, second: 0.0})
    want = model(prompt_ids()).logits
    model.fold_memory_gates()
    assert model.memory_gates == {first: 1.0, second: 1.0}
    torch.testing.assert_close(model(prompt_ids()).logits, want)
    assert not torch.allclose(want, whole)
    model.save_pretrained(tmp_path / "folded")
    stored = load(tmp_path / "folded", dtype=torch.float64)
    torch.testing.assert_close(stored(prompt_ids()).logits, want)


def test_gates_are_not_folded_while_disabled_or_offloaded():
    _, model = pair()
    model.set_memory_gates({1: 0.5})
    before = copy.deepcopy(model.state_dict())
    with (
        model.memory_disabled(),
        pytest.raises(MidusError, match="leave memory_disabled first"),
    ):
        model.fold_memory_gates()
    assert model.memory_gates == {1: 0.5, 4: 1.0}
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    with pytest.raises(MidusError, match="weights that are offloaded"):
        model.to("meta").fold_memory_gates()


@pytest.mark.parametrize("bypass", ["attention", "joined"])
def test_gates_are_not_folded_beside_an_adapter_of_the_bypass(bypass):
    peft = pytest.importorskip("peft")
    model = grown(memory=MemoryConfig(num_subkeys=8, bypass=bypass))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **lora_targets(model)))
    model.set_memory_gates({model.config.memory_positions[0]: 0.5})
    with pytest.raises(MidusError, match="while an adapter is beside a bypass; merge it first"):
        model.fold_memory_gates()
    adapted.merge_and_unload()
    model.fold_memory_gates()
    assert set(model.memory_gates.values()) == {1.0}


def test_gates_that_are_no_mapping_are_refused():
    with pytest.raises(MidusError, match=r"gates=\[1\] must be a dict of numbers by position"):
        grown().set_memory_gates([1])


def test_generation_with_a_gate_is_the_same_with_and_without_a_cache():
    _, model = pair()
    model.set_memory_gates(dict.fromkeys(model.config.memory_positions, 0.5))
    cached = model.generate(**padded(), **GREEDY)
    assert torch.equal(cached, model.generate(**padded(), **GREEDY, use_cache=False))


@torch.no_grad()
@pytest.mark.parametrize("make", [DynamicCache, StaticCache])
def test_a_cache_of_the_other_state_is_refused_untouched_until_it_is_emptied(make):
    _, model = pair()
    ids = prompt_ids()
    options = {"max_cache_len": 20} if make is StaticCache else {}
    cache = make(config=model.config, **options)

    def refused(told):
        with pytest.raises(MidusError, match=told):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(MidusError, match=told):
            model.model(ids[:, :1], None, None, cache)
        assert int(cache.get_seq_length()) == 12

    model(ids, past_key_values=cache)
    with model.memory_disabled():
        refused(r"filled with all memory on, and the model has memory gates \{1: 0.0, ")
    with model.memory_disabled([1]):
        refused("all memory on")
    model(ids[:, :1], past_key_values=cache)  # in its own state it goes on
    cache.reset()
    with model.memory_disabled():
        model(ids, past_key_values=cache)
        length = int(cache.get_seq_length())  # a growing cache's reset leaves its length
    cache = copy.deepcopy(cache)
    with pytest.raises(MidusError, match="and the model has all memory on"):
        model(ids[:, :1], past_key_values=cache)
    with model.memory_disabled([1]), pytest.raises(MidusError, match="start an empty one"):
        model(ids[:, :1], past_key_values=cache)
    assert int(cache.get_seq_length()) == length
    cache.reset()
    out = model(ids, past_key_values=cache).logits
    if make is StaticCache:
        torch.testing.assert_close(out, model(ids).logits)


def test_a_cache_cropped_to_nothing_serves_the_other_state():
    base, model = pair()
    ids = prompt_ids()
    cache = model(ids, use_cache=True).past_key_values
    cache.crop(-12)
    with model.memory_disabled():
        assert torch.equal(model(ids, past_key_values=cache).logits, base(ids).logits)


def test_a_static_cache_that_generate_keeps_serves_both_states():
    base, model = pair()
    options = {**GREEDY, "cache_implementation": "static"}
    inside = base.generate(prompt_ids(), **GREEDY)
    outside = model.generate(prompt_ids(), **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(prompt_ids(), **options), outside)
        with model.memory_disabled():
            assert torch.equal(model.generate(prompt_ids(), **options), inside)


def test_a_cache_handed_to_generate_must_be_of_its_state():
    _, model = pair()
    cache = model(prompt_ids()[:, :8], use_cache=True).past_key_values
    with model.memory_disabled(), pytest.raises(MidusError, match="KV cache was filled"):
        model.generate(prompt_ids(), past_key_values=cache, **GREEDY)


@pytest.mark.parametrize("positions", [[0], ["1"], 1, "14", [1, 2]])
def test_positions_that_are_no_memory_blocks_are_refused(positions):
    _, model = pair()
    with pytest.raises(MidusError, match=r"position"), model.memory_disabled(positions):
        pass
    assert set(model.memory_gates.values()) == {1.0}


@pytest.mark.parametrize("gate", [-0.1, 1.1, float("nan"), "1", None])
def test_gates_outside_zero_and_one_are_refused(gate):
    _, model = pair()
    with pytest.raises(MidusError, match="from 0 to 1"):
        model.set_memory_gates({1: gate})


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_backward_pass_has_the_state_of_its_forward_pass(reentrant):
    _, model = pair()
    model.requires_grad_(True).train()

    def gradient(checkpointing, inside):
        model.zero_grad()
        model.gradient_checkpointing_disable()
        if checkpointing:
            options = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        with model.memory_disabled([1] if inside else []):
            loss = model(prompt_ids(), labels=prompt_ids()).loss
        with model.memory_disabled([] if inside else [1]):
            loss.backward()
        return model.model.layers[0].mlp.up_proj.weight.grad.clone()

    for inside in (True, False):
        torch.testing.assert_close(gradient(True, inside), gradient(False, inside))
    assert not torch.allclose(gradient(True, True), gradient(True, False))


def test_a_compiled_model_follows_the_state():
    base, model = pair()
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    @torch.no_grad()
    def logits(called):
        return called(prompt_ids(), use_cache=False).logits

    for _ in range(2):
        assert torch.equal(logits(compiled), logits(model))
        with compiled.memory_disabled():
            assert torch.equal(logits(compiled), logits(base))
    model.set_memory_gates({1: 0.5})
    assert torch.equal(logits(compiled), logits(model))


def test_a_compiled_model_refuses_a_cache_of_the_other_state():
    _, model = pair()
    with torch.no_grad(), model.memory_disabled():
        cache = model(prompt_ids(), use_cache=True).past_key_values
    with torch.no_grad(), pytest.raises(MidusError, match="KV cache was filled"):
        torch.compile(model, backend="eager")(prompt_ids(), past_key_values=cache)


def test_copies_keep_gates_and_have_their_memory_on():
    _, model = pair()
    model.set_memory_gates({1: 0.5})
    want = model(prompt_ids()).logits
    with model.memory_disabled():
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        assert torch.equal(other(prompt_ids()).logits, want)
        with other.memory_disabled():
            assert model.memory_gates == {1: 0.5, 4: 1.0}


def test_checkpoints_know_nothing_of_the_state(tmp_path):
    _, model = pair()
    whole = model(prompt_ids()).logits
    model.set_memory_gates({1: 0.5})
    with model.memory_disabled():
        model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(prompt_ids()).logits, whole)


def test_fused_steps_run_only_for_blocks_whose_gate_is_one(monkeypatch):
    base, model = pair()
    calls, real = [], fused.attend_and_read
    monkeypatch.setattr(fused, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(fused, "attend_and_read", lambda *args: calls.append(1) or real(*args))
    model.build_value_cache()
    for gates, each_step in (({}, 2), ({1: 0.5}, 1), ({1: 0.5, 4: 0}, 0)):
        model.set_memory_gates(gates)
        out = model.generate(prompt_ids(), max_new_tokens=3, do_sample=False)
        assert len(calls) == 2 * each_step  # the first token comes of the prompt
        assert torch.equal(
            out, model.generate(prompt_ids(), max_new_tokens=3, do_sample=False, use_cache=False)
        )
        calls.clear()
    with model.memory_disabled():
        assert torch.equal(
            model.generate(prompt_ids(), **GREEDY), base.generate(prompt_ids(), **GREEDY)
        )
    assert not calls


def test_value_caches_are_built_only_for_blocks_that_are_on(monkeypatch):
    _, model = pair()
    monkeypatch.setattr(model, "_caches_fit", lambda: True)
    seen = []
    model.lm_head.register_forward_hook(
        lambda *_: seen.append([v.value_cache is not None for v in model._hive_values()])
    )
    with model.memory_disabled([1]):
        model.generate(prompt_ids(), max_new_tokens=1)
    assert seen == [[False, True]]


def test_fast_decoding_has_the_state_and_a_graph_of_another_is_not_replayed(monkeypatch):
    class Graph:
        """Stands in for a CUDA graph: replays in the state in which it was captured."""

        def __init__(self, decoder):
            self.decoder, self.disabled = decoder, 0.0 in model.memory_gates.values()

        def replay(self):
            assert self.disabled == (0.0 in model.memory_gates.values())
            self.decoder._captured = self.decoder._forward()

    captured = []

    def capture(decoder):
        decoder._tables = fast._value_tables(model)
        captured.append(Graph(decoder))
        return captured[-1]

    base, model = pair()
    monkeypatch.setattr(fast, "_why_not", lambda model: "")
    with model.memory_disabled():
        assert torch.equal(
            generate_fast(model, **padded(), **GREEDY), base.generate(**padded(), **GREEDY)
        )
    monkeypatch.setattr(FastDecoder, "_is_graphed", True)
    monkeypatch.setattr(FastDecoder, "_capture", capture)
    decoder, plain = FastDecoder(model, 1, 16), FastDecoder(base, 1, 16)
    decoder.prefill(prompt_ids())
    decoder.step()
    with model.memory_disabled():
        with pytest.raises(MidusError, match="KV cache was filled with all memory on"):
            decoder.step()
        assert torch.equal(decoder.prefill(prompt_ids()), plain.prefill(prompt_ids()))
        monkeypatch.setattr(FastDecoder, "_is_graphed", False)
        want = plain.step()
        monkeypatch.setattr(FastDecoder, "_is_graphed", True)
        assert torch.equal(decoder.step(), want)
    assert [graph.disabled for graph in captured] == [False, True]
    with pytest.raises(MidusError, match="and the model has all memory on"):
        decoder.step()


@pytest.mark.gpu
def test_on_a_gpu_fused_blocks_and_graphs_follow_the_state():
    base, model = pair()
    base, model = base.cuda(), model.cuda()
    ids = prompt_ids(1).cuda()
    with torch.no_grad():
        with model.memory_disabled():
            assert torch.equal(model(ids).logits, base(ids).logits)
            assert torch.equal(
                model.generate(ids, fast=True, **GREEDY), generate_fast(base, ids, **GREEDY)
            )
        decoder, plain = FastDecoder(model, 1, 16), FastDecoder(base, 1, 16)
        for _ in range(2):
            decoder.prefill(ids)
            decoder.step()
            with model.memory_disabled():
                with pytest.raises(MidusError, match="all memory on"):
                    decoder.step()
                assert torch.equal(decoder.prefill(ids), plain.prefill(ids))
                assert torch.equal(decoder.step(), plain.step())
    model.set_memory_gates(dict.fromkeys(model.config.memory_positions, 0.5))
    assert first_difference(model, ids, 10) is None

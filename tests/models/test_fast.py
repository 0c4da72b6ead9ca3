"""Fast generation: the same tokens as `generate`, and one warning where it cannot be."""

import warnings

import pytest
import torch
from tiny import grown, prompt_ids, tiny_base
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from midus import MidusError
from midus.models import fast
from midus.models.fast import FastDecoder, first_difference, generate_fast


@pytest.fixture
def anywhere(monkeypatch):
    """Lets the loop run on a CPU, step by step instead of by graph."""
    monkeypatch.setattr(fast, "_why_not", lambda model: "")


def models():
    return [tiny_base(), grown()]


@pytest.mark.parametrize("model", models(), ids=["base", "grown"])
def test_greedy_tokens_are_those_of_generate(model, anywhere):
    ids = prompt_ids(2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for options in ({}, {"attention_mask": mask}, {"repetition_penalty": 1.7}):
        plain = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
        assert torch.equal(
            generate_fast(model, ids, max_new_tokens=12, do_sample=False, **options), plain
        )


def test_sampling_draws_what_generate_draws(anywhere):
    model, ids = grown(), prompt_ids(2)
    options = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.8, "top_k": 20}
    torch.manual_seed(5)
    plain = model.generate(ids, **options)
    torch.manual_seed(5)
    assert torch.equal(generate_fast(model, ids, **options), plain)


def test_the_end_is_where_generate_ends(anywhere):
    # The flag is read one step late; what is made in between must not be seen.
    model, ids = grown(), prompt_ids(2)
    free = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    for eos in {int(token) for token in free[:, ids.shape[1] + 2 : -1].flatten()}:
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": eos}
        plain = model.generate(ids, **options)
        assert torch.equal(generate_fast(model, ids, **options), plain), eos


def test_stopping_criteria_of_ones_own_are_heard(anywhere):
    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 16)

    criteria = StoppingCriteriaList([After()])
    out = generate_fast(
        grown(), prompt_ids(1, 12), max_new_tokens=30, do_sample=False,
        eos_token_id=None, stopping_criteria=criteria,
    )  # fmt: skip
    assert out.shape[1] == 16


def test_a_streamer_gets_each_token_once(anywhere):
    class Streamer:
        def __init__(self):
            self.tokens, self.ended = [], 0

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended += 1

    model, ids = grown(), prompt_ids(1)
    free = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    for eos in (None, int(free[0, ids.shape[1] + 4])):
        streamer = Streamer()
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": eos}
        out = generate_fast(model, ids, streamer=streamer, **options)
        assert streamer.tokens == out[0].tolist()
        assert streamer.ended == 1


def test_value_caches_are_there_while_it_lasts_and_gone_after(anywhere, monkeypatch):
    model, seen = grown(), []
    real = FastDecoder.prefill

    def prefill(self, *args):
        seen.append(all(values.value_cache is not None for values in model._hive_values()))
        return real(self, *args)

    monkeypatch.setattr(FastDecoder, "prefill", prefill)
    generate_fast(model, prompt_ids(1), max_new_tokens=2)
    assert seen == [True]
    assert all(values.value_cache is None for values in model._hive_values())


def test_a_cpu_is_told_in_one_warning_and_served():
    model, ids = grown(), prompt_ids(1)
    with pytest.warns(UserWarning, match="without CUDA graphs: the model is on cpu"):
        out = generate_fast(model, ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"generation_config": GenerationConfig(num_beams=3, max_new_tokens=3)}, "num_beams=3"),
    ],
)
def test_what_it_cannot_do_is_named(options, named, anywhere):
    with pytest.warns(UserWarning, match=named):
        generate_fast(grown(), prompt_ids(1), **{"max_new_tokens": 3, **options})


def test_sliding_windows_are_refused_by_name(monkeypatch):
    window, whole = grown("gemma2"), grown()
    for model in (window, whole):
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert "window" in fast._why_not(window)
    assert fast._why_not(whole) == ""


def test_it_is_an_argument_of_generate_too(anywhere, monkeypatch):
    model, ids, steps = grown(), prompt_ids(1), []
    real = FastDecoder.step
    monkeypatch.setattr(FastDecoder, "step", lambda *a: (steps.append(1), real(*a))[1])
    plain = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert not steps
    assert torch.equal(model.generate(ids, fast=True, max_new_tokens=4, do_sample=False), plain)
    assert len(steps) == 3


def test_a_decoder_can_be_filled_again():
    model = grown()
    decoder = FastDecoder(model, 1, 24)
    for seed in (3, 4):
        ids = prompt_ids(1, seed=seed)
        plain = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        found = [int(decoder.prefill(ids).argmax())]
        found += [int(decoder.step().argmax()) for _ in range(5)]
        assert found == plain[0, ids.shape[1] :].tolist()


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(MidusError, match=r"\(1, 12\) do not fit a decoder of 1 sequences of 12"):
        FastDecoder(grown(), 1, 12).prefill(prompt_ids(1, 12))


def test_the_first_difference_comes_with_its_margin(anywhere, monkeypatch):
    model, ids = grown(), prompt_ids(1)
    assert first_difference(model, ids, 8) is None
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)

    def other(model, inputs, **kwargs):
        out = plain.clone()
        out[0, ids.shape[1] + 3] = (out[0, ids.shape[1] + 3] + 1) % 99
        return out

    monkeypatch.setattr(fast, "generate_fast", other)
    found = first_difference(model, ids, 8)
    with torch.no_grad():
        scores = model(plain[:, : ids.shape[1] + 3]).logits[0, -1].log_softmax(-1)
    token = int(plain[0, ids.shape[1] + 3])
    assert found.token == 3
    assert found.margin == pytest.approx(float(scores[token] - scores[(token + 1) % 99]), abs=1e-5)
    assert found.margin > 0


def test_nothing_is_warned_of_where_it_works(anywhere):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate_fast(grown(), prompt_ids(1), max_new_tokens=2)

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
    monkeypatch.setattr(model, "_caches_fit", lambda: True)
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
        ({"generation_config": GenerationConfig(stop_strings=["a"])}, "stop_strings"),
    ],
)
def test_what_it_cannot_do_is_named(options, named, anywhere, monkeypatch):
    model = grown()
    monkeypatch.setattr(model, "generate", lambda **kwargs: None)
    with pytest.warns(UserWarning, match=named):
        generate_fast(model, prompt_ids(1), **{"max_new_tokens": 3, **options})


def test_settings_of_the_model_count_where_nothing_else_is_said(anywhere):
    model, ids = grown(), prompt_ids(1)
    model.generation_config.num_beams = 2
    given = GenerationConfig(max_new_tokens=3)
    with pytest.warns(UserWarning, match="num_beams=2"):
        beams = generate_fast(model, ids, given)
    assert torch.equal(beams, model.generate(ids, given))


def test_positions_are_the_ones_generate_would_use(anywhere):
    model, ids = grown(), prompt_ids(2)
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0  # padding on the right, which generate does not refuse
    shifted = torch.arange(ids.shape[1]).expand_as(ids) + 20
    for options in ({"position_ids": shifted}, {"attention_mask": mask}):
        plain = model.generate(ids, max_new_tokens=6, do_sample=False, **options)
        fast_ids = generate_fast(model, ids, max_new_tokens=6, do_sample=False, **options)
        assert torch.equal(fast_ids, plain)


def test_arguments_may_come_by_position(anywhere):
    model, ids = grown(), prompt_ids(1)
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, config, fast=True), model.generate(ids, config))


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_other_attention_is_refused_by_name(attention, monkeypatch):
    model = grown()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    model.config._attn_implementation = attention
    assert f"its attention is '{attention}'" in fast._why_not(model)


def test_positions_that_follow_the_length_are_refused_by_name(monkeypatch):
    model = grown()
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    assert "positions are 'dynamic'" in fast._why_not(model)


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


def test_a_full_or_empty_decoder_takes_no_step():
    decoder = FastDecoder(grown(), 1, 13)
    with pytest.raises(MidusError, match="0 of 13 tokens"):
        decoder.step()
    decoder.prefill(prompt_ids(1, 12))
    decoder.step()
    with pytest.raises(MidusError, match="13 of 13 tokens"):
        decoder.step()


class Replayed:
    """Stands in for a captured graph: a replay runs the step into the captured tensor."""

    def __init__(self, decoder):
        self.decoder = decoder

    def replay(self):
        self.decoder._captured.copy_(self.decoder._forward())


@pytest.fixture
def captures(monkeypatch):
    """Lets decoders on a CPU go the way of graphs."""
    made = []

    def capture(self):
        made.append(self)
        self._tables = fast._value_tables(self._model)
        self._captured = torch.empty(1, 99)
        return Replayed(self)

    monkeypatch.setattr(FastDecoder, "_capture", capture)
    monkeypatch.setattr(FastDecoder, "_is_graphed", property(lambda self: True))
    return made


def test_a_graph_is_captured_once_and_goes_on_from_a_new_prompt(captures):
    model = grown()
    decoder = FastDecoder(model, 1, 24)
    for seed in (3, 4):
        ids = prompt_ids(1, seed=seed)
        plain = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        found = [int(decoder.prefill(ids).argmax())]
        found += [int(decoder.step().argmax()) for _ in range(5)]
        assert found == plain[0, ids.shape[1] :].tolist()
    assert len(captures) == 1


def test_a_graph_of_other_value_caches_is_captured_anew(captures):
    model = grown()
    model.build_value_cache()
    decoder = FastDecoder(model, 1, 24)
    for change, expected in (
        (lambda: None, 1),
        (lambda: None, 1),
        (lambda: model.train().eval(), 2),  # drops them
        (model.build_value_cache, 3),
    ):
        change()
        decoder.prefill(prompt_ids(1))
        decoder.step()
        assert len(captures) == expected


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

"""The lean loop does what `midus train` does; its losses are those of `midus eval perplexity`."""

import math
import weakref
from dataclasses import replace

import pytest
import torch
from small import HML, make_study
from tiny import every_bypass, grown, prompt_ids

from midus import MemoryConfig
from midus.evaluation.perplexity import perplexity
from midus.studies import loop as loop_module
from midus.studies.grid import search_trials
from midus.studies.loop import Loop, data_order
from midus.studies.material import Material
from midus.studies.measures import PartNorms, effective_rank, value_ranks
from midus.studies.scoring import mean_loss, score, score_text
from midus.training.loss import use_chunked_loss
from midus.training.run import make_trainer
from midus.training.watching import read_metrics
from midus.training.weight_size import weight_size

PARTS = {"values": {"lr": 3e-2, "schedule": "linear", "max_grad_norm": 0.02}, "keys": {"lr": 1e-3}}
BY_STREAM = {"values": {"lr": 1e-2, "by_stream": True}}


@pytest.mark.parametrize(
    "method",
    [
        {},
        {**HML, "key_start": "queries", "optimizer": {"parts": PARTS, "decay_ratio": 0.5}},
        {**HML, "optimizer": {"parts": BY_STREAM}},
        {"upscale.method": "llama_pro", "optimizer.weight_decay": 0.1},
        {"control": "lora", "upscale": HML["upscale"]},
    ],
    ids=["full", "hml", "by_stream", "llama_pro", "lora"],
)
def test_the_loop_gives_the_losses_and_weights_of_midus_train(tmp_path, material, method):
    study = make_study(material, methods={"one": {"set": method}}, search={})
    (trial,) = search_trials(study)
    shared = Material(material["base"], material["tokens"], {})
    options = trial.options
    data = shared.sequences("train", 16, options.data.max_tokens)
    loop = Loop(shared.start(options), options, data)
    losses = []
    for _ in range(loop.num_steps):
        loop.step()
        losses.append(loop.take_loss(1))

    trainer = {**options.trainer, "logging_steps": 1, "report_to": "none", "save_steps": 1000}
    (tmp_path / "run").mkdir()
    run = replace(options, output=str(tmp_path / "run"), trainer=trainer)
    hf, _ = make_trainer(run)
    hf.train()
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    theirs = dict(hf.model.named_parameters())
    trained = [name for name, p in loop.model.named_parameters() if p.requires_grad]
    assert trained
    for name, parameter in loop.model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)


def test_rates_are_said_as_they_came_out_and_not_as_multiples(material):
    parts = {"values": {"relative_lr": 0.2, "schedule": "cosine"}, "keys": {"lr": 3e-3}}
    method = {**HML, "optimizer": {"lr": None, "relative_lr": 0.05, "parts": parts}}
    study = make_study(material, methods={"one": {"set": method}}, search={})
    (trial,) = search_trials(study)
    shared = Material(material["base"], material["tokens"], {})
    data = shared.sequences("train", 16, trial.options.data.max_tokens)
    loop = Loop(shared.start(trial.options), trial.options, data)
    size = weight_size(shared.base)
    loop.step()  # rates of the warm-up are lower
    assert loop.rates["decay"] == pytest.approx(0.05 * size)
    assert loop.rates["values"] == pytest.approx(0.2 * size)
    assert loop.rates["keys"] == 3e-3


def test_every_pass_is_a_permutation_of_its_own():
    order = data_order(10, 4, 5, seed=3)  # two steps a pass
    assert order.shape == (20,)
    passes = order.split(8)
    assert all(len(set(one.tolist())) == len(one) for one in passes)
    assert passes[0].tolist() != passes[1].tolist()
    assert torch.equal(order, data_order(10, 4, 5, seed=3))
    assert not torch.equal(order, data_order(10, 4, 5, seed=4))


def test_losses_are_those_of_perplexity(material):
    (trial, *_) = search_trials(make_study(material))
    model = grown()
    ids = prompt_ids(1, 5 * 16 + 3)[0]
    expected = perplexity(model, ids, window=16)
    use_chunked_loss(model, 8)
    windows = ids[: 5 * 16].view(5, 16)
    loss = mean_loss(model, windows, trial.options, 2)
    assert math.exp(loss) == pytest.approx(expected.perplexity, rel=1e-5)
    assert not model.training


def test_a_words_perplexity_counts_all_tokens(material):
    (trial, *_) = search_trials(make_study(material))
    shared = Material(material["base"], material["tokens"], {"other": material["text"]})
    text = shared.texts["other"]
    assert (len(text.ids), text.num_words) == (201, 200)  # every word a token, and EOS
    model = shared.start(trial.options)
    use_chunked_loss(model, 64)
    scores = score_text(model, text, trial.options, 4, shared.device)
    assert scores["tokens"] == 12 * 15
    assert scores["word_perplexity"] == pytest.approx(math.exp(scores["loss"] * 201 / 200))


def test_a_loss_beyond_numbers_is_none():
    assert score(float("nan")) == {"loss": None, "perplexity": None}
    assert score(1e6)["perplexity"] is None
    assert score(2.0)["perplexity"] == pytest.approx(math.e**2)


@every_bypass
def test_part_norms_add_up_to_the_whole(bypass):
    memory = MemoryConfig(num_subkeys=8, top_k=4, bypass=bypass)
    model = grown(memory=memory).train()
    norms = PartNorms(model)
    model(prompt_ids(2, 16), labels=prompt_ids(2, 16)).loss.backward()
    norms.take()
    values = norms.values()
    parts = {"attention", "keys", "values", "value_proj", "norms"}
    assert set(values) == (parts if bypass == "none" else parts | {"bypass"})
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert math.hypot(*values.values()) == pytest.approx(whole.item(), rel=1e-5)


def test_effective_rank_counts_equal_directions():
    rows = torch.zeros(6, 4, dtype=torch.float64)
    assert effective_rank(rows) == 0.0
    rows[0, 0], rows[1, 1], rows[2, 2] = 2.0, -2.0, 2.0
    assert effective_rank(rows) == pytest.approx(3.0)
    rows[2, 2] = 0.0
    rows[1, 1] = 1.0  # shares 2/3 and 1/3
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert effective_rank(rows) == pytest.approx(math.exp(entropy))
    assert len(value_ranks(grown())) == 2


def test_a_capture_that_fails_leaves_the_loop_eager_and_says_why(material, monkeypatch):
    study = make_study(material, methods={"one": {"set": HML}}, search={})
    (trial,) = search_trials(study)
    shared = Material(material["base"], material["tokens"], {})
    data = shared.sequences("train", 16, trial.options.data.max_tokens)
    plain = Loop(shared.start(trial.options), trial.options, data)
    tried = []

    def fail(*args):
        tried.append(args)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(loop_module, "why_not_graphed", lambda *_: "")
    monkeypatch.setattr(loop_module, "GraphedStep", fail)
    loop = Loop(shared.start(trial.options), trial.options, data)
    assert loop.why_not_graphed == ""
    for _ in range(3):
        loop.step()
        plain.step()
    assert len(tried) == 1
    assert "OutOfMemoryError: no room" in loop.why_not_graphed
    assert torch.equal(loop.loss, plain.loss)


def test_a_loop_that_has_ended_holds_no_graph(material, monkeypatch):
    (trial,) = search_trials(make_study(material, methods={"full": {}}, search={}))
    shared = Material(material["base"], material["tokens"], {})
    monkeypatch.setattr(loop_module, "why_not_graphed", lambda *_: "")
    graphs = []

    class Graph:
        def __init__(self, model, loss_of, example):
            self._loss_of = loss_of
            graphs.append(weakref.ref(self))

        def __call__(self, batch):
            loss = self._loss_of(batch)
            loss.backward()
            return loss.detach()

    monkeypatch.setattr(loop_module, "GraphedStep", Graph)
    data = shared.sequences("train", 16, trial.options.data.max_tokens)
    loop = Loop(shared.start(trial.options), trial.options, data)
    loop.step()
    loop.step()
    assert loop.is_graphed
    assert graphs[0]() is not None
    loop.end()
    assert graphs[0]() is None

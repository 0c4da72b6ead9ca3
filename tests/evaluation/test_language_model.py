"""A model of the harness whose answers are the harness's, with less work."""

import json
from types import SimpleNamespace

import pytest
from benchmarks import save_byte_model, words
from lm_eval.models.huggingface import HFLM
from tiny import load

from midus.evaluation import language_model
from midus.evaluation.evaluate import evaluate_models, select, usable_tokenizer
from midus.evaluation.language_model import make_lm
from midus.evaluation.store import Store

LENGTH = 48


@pytest.fixture
def asked(byte_model):
    """A model, its tokenizer, and requests of every kind."""
    pairs = [(words(i, 1 + i % 9), f" {letter}") for i in range(27) for letter in "AB"]
    pairs += [(f"{words(i)} ", words(i, 2)) for i in range(8)]  # a space that moves
    pairs += [("", words(3, 2)), (words(4, 40), words(5, 2))]  # nothing before it, and too much
    texts = [words(1, 2), words(2, 60), words(3, 25)]
    as_requests = lambda args: [SimpleNamespace(args=each) for each in args]  # noqa: E731
    model, tokenizer = load(byte_model), usable_tokenizer(byte_model)
    return model, tokenizer, as_requests(pairs), as_requests((text,) for text in texts)


@pytest.mark.parametrize("tokens_a_row", [None, 40, 1000])
def test_answers_are_those_of_the_harness(asked, tokens_a_row, monkeypatch):
    model, tokenizer, pairs, texts = asked
    sizes, plain = [], language_model.log_likelihoods

    def watched(of_model, batch):
        sizes.append((len(batch), max(row.num_tokens for row in batch)))
        return plain(of_model, batch)

    monkeypatch.setattr(language_model, "log_likelihoods", watched)
    settings = {"batch_size": 4, "max_length": LENGTH}
    theirs = HFLM(model, tokenizer=tokenizer, backend="causal", **settings)
    ours = make_lm(model, tokenizer, {}, tokens_a_row=tokens_a_row, **settings)
    wanted = theirs.loglikelihood(pairs, disable_tqdm=True)
    found = ours.loglikelihood(pairs, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    wanted = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(wanted, abs=1e-3)
    assert bool(sizes) == bool(tokens_a_row)
    if tokens_a_row == 40:
        assert all(rows * width <= 4 * 40 for rows, width in sizes)
        assert max(rows for rows, _ in sizes) > 4


def test_a_continuation_longer_than_the_model_is_refused(asked):
    model, tokenizer, *_ = asked
    lm = make_lm(model, tokenizer, {}, batch_size=4, max_length=8, tokens_a_row=20)
    with pytest.raises(AssertionError, match="does not fit the model"):
        lm.loglikelihood([SimpleNamespace(args=("a", words(0, 9)))], disable_tqdm=True)


@pytest.mark.parametrize("tokens_a_row", [None, 20])
def test_spaces_alone_before_a_continuation_are_refused(asked, tokens_a_row):
    model, tokenizer, *_ = asked
    lm = make_lm(model, tokenizer, {}, batch_size=4, max_length=LENGTH, tokens_a_row=tokens_a_row)
    with pytest.raises(AssertionError):
        lm.loglikelihood([SimpleNamespace(args=("  ", words(0, 2)))], disable_tqdm=True)


def count_cuts(monkeypatch):
    cut, plain = [], HFLM.tok_encode
    watched = lambda self, text, *args: cut.append(text) or plain(self, text, *args)  # noqa: E731
    monkeypatch.setattr(HFLM, "tok_encode", watched)
    return cut


def test_a_text_is_cut_into_tokens_once_for_all_models(asked, byte_model, monkeypatch):
    model, tokenizer, pairs, texts = asked
    cut, encoded = count_cuts(monkeypatch), {}
    for each in (model, load(byte_model)):
        lm = make_lm(each, tokenizer, encoded, batch_size=4, max_length=LENGTH)
        lm.loglikelihood(pairs, disable_tqdm=True)
        lm.loglikelihood_rolling(texts, disable_tqdm=True)
        assert len(cut) == len(set(cut)) == len(encoded) > 0


def test_models_of_one_tokenizer_share_tokens_and_others_do_not(data_dir, tmp_path, monkeypatch):
    folders = [str(tmp_path / name) for name in ("one", "same", "other")]
    for seed, folder in enumerate(folders):
        save_byte_model(folder, seed)
    path = tmp_path / "other" / "tokenizer.json"
    facts = json.loads(path.read_text())
    vocabulary = facts["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    path.write_text(json.dumps(facts))
    selection = select(None, ["piqa"], data_dir)

    def scores(models, name):
        found = evaluate_models(models, selection, limit=12, store=Store(tmp_path / name))
        return [each.scores for each in found]

    alone = [scores([folder], folder)[0] for folder in folders]
    cut = count_cuts(monkeypatch)
    assert scores(folders, "together") == alone
    assert len(cut) == 2 * len(set(cut))

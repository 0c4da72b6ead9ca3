"""`prepare_text`: built once, opened afterwards; mixtures, held-out text, foreign tokenizers."""

import os

import pytest
from corpora import sentences, token_folder, write_lines
from tiny import save_base

from midus.data import DataOptions, SourceOptions, prepare_text
from midus.data.build import build_tokens
from midus.errors import MidusError


@pytest.fixture
def corpus(tmp_path):
    return write_lines(tmp_path / "a.jsonl", sentences(200))


def options(tmp_path, *sources, **values):
    return DataOptions(
        **{"sources": sources, "seq_len": 16, "cache": str(tmp_path / "cache"), **values}
    )


def ids(dataset):
    return [item["input_ids"].tolist() for item in dataset]


def test_text_is_tokenised_once(tmp_path, model, corpus, monkeypatch):
    chosen = options(tmp_path, str(corpus), held_out=0.2)
    first = prepare_text(chosen, model)
    assert first.num_train_tokens == len(first.train) * 16
    assert first.held_out is not None
    assert first.bad_rows == 0
    assert first.manifests[0]["sources"][0]["path"] == str(corpus)
    monkeypatch.setattr("midus.data.prepare.build_tokens", None)
    again = prepare_text(chosen, model)
    assert ids(again.train) == ids(first.train)
    assert ids(again.held_out) == ids(first.held_out)


@pytest.mark.parametrize("lost", ["manifest.json", "train-00000.bin"])
def test_a_cached_folder_that_lost_a_file_is_made_again(tmp_path, model, corpus, lost):
    chosen = options(tmp_path, str(corpus))
    first = ids(prepare_text(chosen, model).train)
    (path,) = (tmp_path / "cache").rglob(lost)
    path.unlink()
    assert ids(prepare_text(chosen, model).train) == first
    assert path.is_file()


def test_a_changed_file_is_tokenised_again(tmp_path, model, corpus):
    chosen = options(tmp_path, str(corpus))
    first = prepare_text(chosen, model)
    write_lines(corpus, sentences(300))
    os.utime(corpus, ns=(1, 1))
    assert prepare_text(chosen, model).num_train_tokens > first.num_train_tokens


def test_max_tokens_is_the_most_that_is_taken(tmp_path, model, corpus):
    prepared = prepare_text(options(tmp_path, str(corpus), max_tokens=330), model)
    assert prepared.num_train_tokens == 320
    assert not prepared.notes or "held-out" in prepared.notes[0]
    everything = prepare_text(options(tmp_path, str(corpus), max_tokens=10**6), model)
    assert everything.num_train_tokens < 2_000  # one source is not repeated
    with pytest.raises(MidusError, match="max_tokens=15 is less than one sequence"):
        prepare_text(options(tmp_path, str(corpus), max_tokens=15), model)


def test_sources_are_mixed_by_weight(tmp_path, model, corpus):
    other = write_lines(tmp_path / "b.jsonl", sentences(20, seed=1))
    sources = (SourceOptions(path=str(corpus), weight=3), SourceOptions(path=str(other)))
    prepared = prepare_text(options(tmp_path, *sources, held_out=0), model)
    assert prepared.held_out is None
    counts = [int((prepared.train.chosen == i).sum()) for i in (0, 1)]
    assert abs(counts[0] - 3 * counts[1]) <= 3
    longer = prepare_text(options(tmp_path, *sources, held_out=0, max_tokens=1_600), model)
    assert longer.num_train_tokens == 1_600
    assert longer.notes == [f"{other} has too little text and is passed 2.08 times"]


def test_held_out_text_is_not_trained_on(tmp_path, model, corpus):
    chosen = options(tmp_path, str(corpus), held_out=0.2, seq_len=10)
    prepared = prepare_text(chosen, model)
    # Documents have ten tokens, so a sequence is a document.
    train, held_out = (set(map(tuple, ids(d))) for d in (prepared.train, prepared.held_out))
    assert len(train) + len(held_out) == 200
    assert not train & held_out


def test_too_little_held_out_text_is_noted(tmp_path, model):
    path = write_lines(tmp_path / "few.jsonl", sentences(5))
    prepared = prepare_text(options(tmp_path, str(path)), model)
    assert prepared.held_out is None
    assert prepared.notes == [f"{path} has no held-out text"]


def test_eval_sources_are_held_out_whole(tmp_path, model, corpus):
    other = write_lines(tmp_path / "b.jsonl", sentences(20, seed=1))
    chosen = options(tmp_path, str(corpus), eval_sources=str(other), seq_len=10)
    prepared = prepare_text(chosen, model)
    assert len(prepared.train) == 200
    assert len(prepared.held_out) == 20
    few = prepare_text(
        options(tmp_path, str(corpus), eval_sources=str(other), eval_tokens=32), model
    )
    assert len(few.held_out) == 2


def test_token_folders_are_used_as_they_are(tmp_path, model, corpus):
    made = build_tokens([SourceOptions(path=str(corpus))], model, tmp_path / "out", held_out=0.2)
    prepared = prepare_text(options(tmp_path, str(tmp_path / "out")), model)
    assert prepared.num_train_tokens == made.num_tokens("train") // 16 * 16
    assert prepared.held_out is not None
    assert not (tmp_path / "cache").exists()


def test_tokens_of_another_tokenizer_are_refused(tmp_path, model):
    folder = token_folder(tmp_path / "t", train=[list(range(64))])
    with pytest.raises(MidusError) as error:
        prepare_text(options(tmp_path, str(folder)), model)
    assert f"{folder} was made with the tokenizer of other" in str(error.value)
    assert f"--tokenizer {model}" in str(error.value)


def test_a_tokenizer_saved_by_a_trainer_is_the_same(tmp_path, model, corpus):
    from transformers import AutoTokenizer

    made = build_tokens([SourceOptions(path=str(corpus))], model, tmp_path / "out")
    save_base(tmp_path / "trained")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer(["w4", "w4 w5"], padding=True, truncation=True, max_length=8)
    tokenizer.save_pretrained(tmp_path / "trained")
    prepared = prepare_text(options(tmp_path, str(made.path)), tmp_path / "trained")
    assert len(prepared.train) > 0


def test_a_hub_dataset_is_tokenised_once_a_revision_and_found_again_offline(
    tmp_path, model, monkeypatch
):
    import datasets

    rows = [{"text": text} for text in sentences(100)]
    loaded = []

    def load_dataset(path, revision, **_):
        loaded.append(revision)
        return rows

    def at(revision):
        for module in ("plan", "prepare"):
            monkeypatch.setattr(f"midus.data.{module}.hub_revision", lambda _: revision)
        return prepare_text(options(tmp_path, "org/texts"), model).manifests[0]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [at(revision)["sources"][0]["revision"] for revision in ("a1", "a1", "b2", None)] == [
        "a1",
        "a1",
        "b2",
        "b2",
    ]
    assert loaded == ["a1", "b2"]

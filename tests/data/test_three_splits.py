"""A test split beside the held-out one: by a hash of the text, and nothing else changes."""

import json

import pytest
from corpora import contents, documents, sentences, write_lines

from midus.data.build import build_tokens
from midus.data.documents import content_hash
from midus.data.options import SourceOptions
from midus.data.tokens import TokenDataset
from midus.errors import MidusError


@pytest.fixture
def corpus(tmp_path):
    texts = sentences(200)
    write_lines(tmp_path / "a.jsonl", texts)
    return str(tmp_path / "a.jsonl"), texts


def build(path, model, out, **options):
    return build_tokens([SourceOptions(path=path)], model, out, **options)


def words(text):
    return [int(word[1:]) for word in text.split()]


def test_each_text_is_in_the_split_of_its_hash(tmp_path, model, corpus):
    path, texts = corpus
    made = build(path, model, tmp_path / "out", held_out=0.2, test=0.3).path
    expected = {"held_out": [], "test": [], "train": []}
    for text in texts:
        place = content_hash(text) / 2**64
        split = "held_out" if place < 0.2 else "test" if place < 0.5 else "train"
        expected[split].append(words(text))
    for split, wanted in expected.items():
        assert len(wanted) > 20
        assert sorted(documents(made, split)) == sorted(wanted)


def test_a_test_split_is_taken_from_training_only(tmp_path, model, corpus):
    path, _ = corpus
    without = build(path, model, tmp_path / "without", held_out=0.2).path
    having = build(path, model, tmp_path / "having", held_out=0.2, test=0.3).path
    assert documents(without, "held_out") == documents(having, "held_out")
    kept = documents(having, "train")
    assert [d for d in documents(without, "train") if d in kept] == kept
    assert "test" not in json.loads((without / "manifest.json").read_text())["splits"]
    assert "test" not in json.loads((without / "manifest.json").read_text())


def test_copies_that_differ_in_whitespace_are_in_one_split(tmp_path, model):
    texts = sentences(60)
    copies = [copy for t in texts for copy in (t, t.replace(" ", "\n", 1), f"  {t}\t")]
    write_lines(tmp_path / "b.jsonl", copies)
    path, shares = str(tmp_path / "b.jsonl"), {"held_out": 0.2, "test": 0.3}
    made = build(path, model, tmp_path / "one", **shares).path
    for split in ("train", "held_out", "test"):
        found = sorted(documents(made, split))
        assert found
        assert found[::3] == found[1::3] == found[2::3]
    again = build(path, model, tmp_path / "two", tasks=3, **shares).path
    assert contents(made) == contents(again)


def test_numbers_of_tokens_are_kept_for_each_split(tmp_path, model, corpus):
    path, _ = corpus
    options = {"held_out": 0.2, "test": 0.3, "eval_tokens": 55, "test_tokens": 77}
    made = build(path, model, tmp_path / "one", max_tokens=333, **options)
    assert [made.num_tokens(s) for s in ("train", "held_out", "test")] == [333, 55, 77]
    again = build(path, model, tmp_path / "two", max_tokens=333, tasks=3, **options)
    assert contents(made.path) == contents(again.path)
    assert len(TokenDataset(made, "test", 16)) == 4


def test_shares_that_leave_nothing_to_train_on_are_refused(tmp_path, model, corpus):
    with pytest.raises(MidusError, match=r"held_out \+ test=1.1 must be a share"):
        build(corpus[0], model, tmp_path / "out", held_out=0.5, test=0.6)

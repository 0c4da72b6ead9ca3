import math

import pytest
import torch
from tiny import MEMORY, fill_tables, load, save_base

from midus import MidusError, UpscaleConfig, upscale_checkpoint
from midus.data.ids import read_ids
from midus.evaluation.perplexity import perplexity
from midus.models.loading import load_tokenizer

TEXT = " ".join(f"w{4 + i * 7 % 90}" for i in range(25))


@pytest.fixture
def base(tmp_path):
    save_base(tmp_path / "base")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "base"


def test_ten_tokens_are_as_by_hand(base):
    model = load(base)
    ids = torch.arange(5, 15)
    with torch.no_grad():
        logits = model(ids[None]).logits[0].double()
    nll = [-math.log(logits[t].softmax(-1)[ids[t + 1]].item()) for t in range(9)]
    result = perplexity(model, ids, window=10)
    assert math.isclose(result.perplexity, math.exp(sum(nll) / 9), rel_tol=1e-6)
    assert (result.num_tokens, result.num_windows) == (9, 1)


def test_windows_stand_alone_and_only_whole_ones_count(base):
    model = load(base)
    ids = torch.arange(5, 30)
    parts = [perplexity(model, ids[i : i + 10], window=10).perplexity for i in (0, 10)]
    whole = perplexity(model, ids, window=10)
    assert whole.num_windows == 2
    mean = sum(math.log(part) for part in parts) / 2
    assert math.isclose(whole.perplexity, math.exp(mean), rel_tol=1e-6)


def test_it_is_the_same_with_and_without_up_scaling_before_training(midus, base, tmp_path):
    import json

    upscale_checkpoint(base, tmp_path / "out", UpscaleConfig(memory=MEMORY), delta=True)
    args = [base, tmp_path / "out", "--text", tmp_path / "text.txt", "--window", 12, "--json"]
    result = midus("eval", "perplexity", *args)
    assert result.code == 0, result.err
    first, second = json.loads(result.out)["rows"]
    assert first["perplexity"] == second["perplexity"]
    trained = fill_tables(load(tmp_path / "out"))
    ids = read_ids(tmp_path / "text.txt", load_tokenizer(base))
    assert perplexity(trained, ids, window=12).perplexity != first["perplexity"]


def test_a_text_shorter_than_a_window_is_refused(midus, base, tmp_path):
    result = midus("eval", "perplexity", base, "--text", tmp_path / "text.txt")
    assert result.code == 2
    assert "the text has 26 tokens, less than one window of 128" in result.err
    result = midus("eval", "perplexity", base, "--text", tmp_path / "text.txt", "--window", 999)
    assert "window=999 is more than the model's 128 positions" in result.err


def test_a_broken_row_is_named(midus, base, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "w5 w6"}\n{"text": \n{"text": "w7"}\n')
    result = midus("eval", "perplexity", base, "--text", path, "--window", 2)
    assert result.code == 2
    assert f"{path}:2 cannot be read: invalid JSON" in result.err


def test_documents_end_with_the_end_token(base, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "w5 w6"}\n{"text": "w7"}\n')
    tokenizer = load_tokenizer(base)
    assert read_ids(path, tokenizer).tolist() == [5, 6, 2, 7, 2]
    assert read_ids(path, tokenizer, 4).tolist() == [5, 6, 2, 7]
    with pytest.raises(MidusError, match="does not exist"):
        read_ids(tmp_path / "none.txt", tokenizer)

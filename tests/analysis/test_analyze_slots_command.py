"""`midus analyze slots` end to end on a tiny model."""

import json
import lzma

import pytest
import torch
from tiny import fill_tables, load, save_base

from midus.models.identity import model_id
from midus.models.loading import load_tokenizer

OPTIONS = ("--window", 16, "--max-tokens", 64, "--top", 3)


@pytest.fixture
def model(midus, tmp_path):
    """An up-scaled model with filled tables, as a delta."""
    save_base(tmp_path / "base")
    folder = tmp_path / "grown"
    assert midus("upscale", tmp_path / "base", folder, "--num-subkeys", 8, "--delta").code == 0
    grown = fill_tables(load(folder))
    grown.save_pretrained(folder, delta=True)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{4 + i % 90}" for i in range(200)))
    return path


def test_json_and_figure_are_written_and_a_summary_is_printed(midus, model, text, tmp_path):
    out = tmp_path / "out"
    result = midus("analyze", "slots", model, "--text", text, *OPTIONS, "-o", out)
    assert result.code == 0, result.err
    values = json.loads((out / "slots.json").read_text())
    assert values["kind"] == "midus.slots"
    assert values["model"] == str(model)
    assert values["model_id"] == model_id(model)
    assert values["figures"] == ["slots.png"]
    assert (out / "slots.png").read_bytes().startswith(b"\x89PNG")
    assert values["text"] == str(text)
    assert (values["num_tokens"], values["window"]) == (64, 16)
    assert {"hardware", "versions", "commit", "date", "command"} <= values.keys()
    first, second = values["blocks"]
    assert (first["index"], first["anchor"], second["index"], second["anchor"]) == (1, 1, 4, 3)
    assert set(first) == {
        "index", "anchor", "kind", "num_heads", "num_slots", "top_k", "used", "entropy",
        "weighted_entropy", "dead_slots", "slots_no_head_uses", "busiest_percent_share",
        "head_overlap", "value_norms", "correction_norm", "correction_ratio", "rank_frequency",
    }  # fmt: skip
    slots = values["busiest"]["slots"]
    assert len(slots) == 3
    for slot in slots:
        line = f"head {slot['head']}, slot {slot['slot']} (row {slot['row']}, column {slot['col']})"
        assert line in result.out
        assert repr(slot["tokens"][0]["token"]) in result.out
        assert repr(slot["promotes"][0]["token"]) in result.out
        assert f"⟦{slot['contexts'][0]['token']}⟧" in result.out
    assert f"busiest slots of block {values['busiest']['block']}" in result.out
    assert "64 tokens in windows of 16; hml, 4 heads of 64 slots, 4 read a token" in result.out


def test_hubs_are_marked(midus, model, tmp_path):
    text = tmp_path / "same.txt"
    text.write_text("w5 " * 64)  # every token reads the same slots
    options = ("--text", text, "--window", 16, "--max-tokens", 64, "--top", 400)
    result = midus("analyze", "slots", model, *options, "-o", tmp_path / "out")
    slots = json.loads((tmp_path / "out" / "slots.json").read_text())["busiest"]["slots"]
    hubs = sum(slot["count"] >= 32 for slot in slots)
    assert hubs > 0
    assert result.out.count(", hub") == hubs


def test_json_output_is_the_file_and_the_folder_is_named_after_the_model(
    midus, model, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = midus("analyze", "slots", model, "--text", text, *OPTIONS, "--block", 4, "--json")
    assert result.code == 0, result.err
    values = json.loads(result.out)
    assert values == json.loads((tmp_path / "analysis" / "grown" / "slots.json").read_text())
    assert values["busiest"]["block"] == 4


def test_rows_are_read_and_ended_like_documents_of_training(midus, model, tmp_path):
    path = tmp_path / "rows.jsonl.xz"
    rows = [{"text": "w10 w11 w12"}, {"text": "w13 w14"}]
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    options = ("--text", path, "--window", 7, "--max-tokens", 7, "--top", 400, "--json")
    values = json.loads(midus("analyze", "slots", model, *options, "-o", tmp_path).out)
    assert values["num_tokens"] == 7
    seen = {t["token"] for slot in values["busiest"]["slots"] for t in slot["tokens"]}
    assert seen == {"w10", "w11", "w12", "w13", "w14", "</s>"}


def test_a_tokenizer_without_pad_token_will_do(midus, model, text, tmp_path):
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("pad_token")
    path.write_text(json.dumps(settings))
    assert load_tokenizer(model).pad_token is None
    result = midus("analyze", "slots", model, "--text", text, *OPTIONS, "-o", tmp_path / "out")
    assert result.code == 0, result.err


def test_a_single_block_with_a_single_head_is_drawn(midus, tmp_path, text):
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    save_base(tmp_path / "base", **shape)
    options = ("--num-subkeys", 8, "--positions", 2)
    assert midus("upscale", tmp_path / "base", tmp_path / "one", *options).code == 0
    result = midus("analyze", "slots", tmp_path / "one", "--text", text, *OPTIONS, "-o", tmp_path)
    assert result.code == 0, result.err
    (block,) = json.loads((tmp_path / "slots.json").read_text())["blocks"]
    assert block["head_overlap"]["mean_jaccard"] is None
    assert torch.tensor(block["head_overlap"]["jaccard"]).tolist() == [[1.0]]


def test_a_base_elsewhere_can_be_named(midus, model, text, tmp_path):
    (tmp_path / "base").rename(tmp_path / "moved")
    arguments = ("analyze", "slots", model, "--text", text, *OPTIONS, "-o", tmp_path / "out")
    assert "base" in midus(*arguments).err
    assert midus(*arguments, "--base", tmp_path / "moved").code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--window", 512), "the text has 201 tokens, fewer than one window of 512"),
        (("--window", 64, "--max-tokens", 32), "max_tokens=32 is less than window=64"),
        (("--window", 16, "--block", 0), "block=0 is no memory block"),
        (("--window", 16, "--device", "nowhere"), "device='nowhere' cannot be used"),
    ],
)
def test_bad_options_are_one_sentence(midus, model, text, tmp_path, options, said):
    result = midus("analyze", "slots", model, "--text", text, *options, "-o", tmp_path / "out")
    assert result.code == 2
    assert result.err.startswith("midus: ")
    assert said in result.err
    assert not (tmp_path / "out").exists()


def test_bad_models_and_texts_are_one_sentence(midus, model, text, tmp_path):
    result = midus("analyze", "slots", tmp_path / "base", "--text", text)
    assert result.code == 2
    assert "has no memory blocks" in result.err
    for content, said in (("", "holds no text"), ('{"a": 1}\n', "no field 'text'")):
        path = tmp_path / "rows.jsonl"
        path.write_text(content)
        result = midus("analyze", "slots", model, "--text", path)
        assert result.code == 2
        assert said in result.err
    result = midus("analyze", "slots", model, "--text", text, "-o", text)
    assert result.code == 2
    assert "text.txt is a file" in result.err
    result = midus("analyze", "slots", model, "--text", tmp_path / "none.txt")
    assert result.code == 2
    assert "none.txt does not exist" in result.err

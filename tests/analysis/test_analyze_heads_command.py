"""`midus analyze heads` end to end on tiny models."""

import json

import pytest
import torch
from tiny import fill_tables, load, save_base

from midus.analysis.examples import Example
from midus.analysis.head_importance import head_importance
from midus.models.identity import model_id
from midus.models.loading import load_tokenizer

WORDS = [
    {"context": "w5 w17 w40", "continuation": " w33 w8"},
    {"context": "w60", "continuation": " w9 w71 w12 w25"},
    {"context": "w88 w4 w14 w15", "continuation": " w65"},
]
EXAMPLES = [Example(**row) for row in WORDS]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in WORDS))
    return path


@pytest.fixture
def base(tmp_path):
    save_base(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def model(midus, base, tmp_path):
    """A delta whose memory speaks."""
    assert midus("upscale", base, tmp_path / "grown", "--num-subkeys", 8, "--delta").code == 0
    fill_tables(load(tmp_path / "grown")).save_pretrained(tmp_path / "grown")
    return tmp_path / "grown"


def test_both_models_are_scored_drawn_and_summarised(midus, base, model, data, tmp_path):
    result = midus("analyze", "heads", model, "--data", data, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    values = json.loads((tmp_path / "out" / "heads.json").read_text())
    assert values["kind"] == "midus.heads"
    assert values["model_id"] == model_id(model)
    assert values["task"] == "custom"
    assert values["num_examples"] == 3
    assert (values["reduction"], values["loss"], values["layer_norm"]) == ("example", "sum", False)
    assert values["base"]["model"] == str(base.resolve())
    assert values["base"]["model_id"] == model_id(base)
    assert (values["base"]["num_layers"], values["base"]["num_heads"]) == (4, 4)
    assert [layer["kind"] for layer in values["layers"]["model"]].count("memory") == 2
    tokenizer = load_tokenizer(base)
    for name, folder in (("base", base), ("model", model)):
        # In one batch, as the command has them: sums of another batch differ in the last bits.
        expected = head_importance(load(folder).eval(), tokenizer, EXAMPLES, batch_size=8)
        assert torch.tensor(values["importance"][name]).allclose(expected.float())
        variances = [sum((x - row.mean()) ** 2 for x in row) / 4 for row in expected]
        assert values["variance"][name] == pytest.approx([v.item() for v in variances])
    assert values["summary"]["num_base_layers"] == 4
    higher = values["summary"]["num_layers_of_higher_variance"]
    assert f"higher than in the base in {higher} of its 4 layers" in result.out
    assert values["figures"] == ["heads.png"]
    assert (tmp_path / "out" / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_options_reach_the_scores_and_json_is_the_file(midus, base, model, data, tmp_path):
    result = midus(
        "analyze", "heads", model, "--base", base, "--data", data, "--limit", 2, "--layer-norm",
        "--reduction", "token", "--loss", "mean", "-o", tmp_path / "out", "--json",
    )  # fmt: skip
    values = json.loads(result.out)
    assert values == json.loads((tmp_path / "out" / "heads.json").read_text())
    assert values["num_examples"] == 2
    options = {"reduction": "token", "loss": "mean", "layer_norm": True}
    expected = head_importance(load(base).eval(), load_tokenizer(base), EXAMPLES[:2], **options)
    assert torch.tensor(values["importance"]["base"]).allclose(expected.float())


def test_a_plain_model_stands_alone(midus, base, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = midus("analyze", "heads", base, "--data", data)
    assert result.code == 0, result.err
    values = json.loads((tmp_path / "analysis" / "base" / "heads.json").read_text())
    assert values["base"] is None
    assert values["summary"] is None
    assert values["importance"]["base"] is None
    assert len(values["importance"]["model"]) == len(values["variance"]["model"]) == 4
    assert (tmp_path / "analysis" / "base" / "heads.png").exists()


@pytest.mark.parametrize("method", ["midus", "solar"])
def test_untrained_and_copied_blocks_are_drawn_too(midus, base, data, tmp_path, method):
    small = ("--num-subkeys", 8) if method == "midus" else ()
    assert midus("upscale", base, tmp_path / "g", "--method", method, *small, "--full").code == 0
    result = midus("analyze", "heads", tmp_path / "g", "--data", data, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    values = json.loads((tmp_path / "out" / "heads.json").read_text())
    kinds = {layer["kind"] for layer in values["layers"]["model"]}
    assert kinds == {"base", "memory" if method == "midus" else "copy"}
    if method == "midus":
        assert values["summary"]["mean_variance_ratio"] == pytest.approx(1)


def test_bad_input_is_one_sentence(midus, base, model, data, tmp_path):
    save_base(tmp_path / "deeper", num_hidden_layers=5)
    save_base(tmp_path / "other", "qwen2")
    save_base(tmp_path / "wider", hidden_size=64)
    save_base(tmp_path / "wordy", vocab_size=120)
    out = ("-o", tmp_path / "out")
    for args, message in (
        (("--data", tmp_path / "no.jsonl"), "no.jsonl does not exist"),
        (("--data", data, "--base", tmp_path / "deeper"), "has 4 base blocks and"),
        (("--data", data, "--base", tmp_path / "other"), "has the model type llama and"),
        (("--data", data, "--base", tmp_path / "wider"), "has the width 32 and"),
        (("--data", data, "--base", tmp_path / "wordy"), "has a vocabulary of 99 and"),
        (("--data", data, "--dtype", "int8"), "dtype='int8' is unknown"),
        (("--data", data, "-o", data), "rows.jsonl is a file; give a folder"),
        ((), "PIQA cannot be had from the hub"),
    ):
        result = midus("analyze", "heads", model, *out, *args)
        assert result.code == 2, args
        assert message in result.err, args
        assert result.err.count("\n") == 1, args
    assert "--data" in result.err
    assert not (tmp_path / "out").exists()


def test_a_delta_that_lost_its_base_asks_for_it(midus, base, model, data, tmp_path):
    fill_tables(load(model)).save_pretrained(model, delta=True)
    base.rename(tmp_path / "moved")
    args = ("analyze", "heads", model, "--data", data, "-o", tmp_path / "out")
    result = midus(*args)
    assert result.code == 2
    assert "the recorded base cannot be used" in result.err
    assert "--base" in result.err
    assert midus(*args, "--base", tmp_path / "moved").code == 0


def test_a_full_model_that_lost_its_base_is_measured_alone(midus, base, data, tmp_path):
    assert midus("upscale", base, tmp_path / "g", "--num-subkeys", 8, "--full").code == 0
    base.rename(tmp_path / "moved")
    args = ("analyze", "heads", tmp_path / "g", "--data", data, "-o", tmp_path / "out")
    with pytest.warns(match="the recorded base cannot be used: .* give --base to compare"):
        result = midus(*args)
    assert result.code == 0, result.err
    values = json.loads((tmp_path / "out" / "heads.json").read_text())
    assert values["base"] is values["summary"] is None
    assert [layer["kind"] for layer in values["layers"]["model"]].count("memory") == 2
    assert midus(*args, "--base", tmp_path / "moved").code == 0
    assert json.loads((tmp_path / "out" / "heads.json").read_text())["summary"]

"""`midus analyze theorem` end to end."""

import json

import pytest
from tiny import fill_tables, load, save_base

from midus.analysis import theorem_checks
from midus.cli.analyze_theorem import _percent
from midus.models.identity import model_id

COMMON = ("kind", "model", "model_id", "hardware", "versions", "commit", "date", "command")


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


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"w{4 + i * i % 90}" for i in range(60)))
    return path


def assert_refused(result, *parts):
    assert result.code == 2, result.out + result.err
    assert result.err.startswith("midus: ")
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err


def test_random_instances_need_no_model(midus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = midus("analyze", "theorem", "--instances", 12, "--json")
    assert result.code == 0, result.err
    folder = tmp_path / "analysis" / "theorem"
    values = json.loads(result.out)
    assert values == json.loads((folder / "theorem.json").read_text())
    assert values["kind"] == "midus.theorem"
    assert values["model"] is values["model_id"] is values["model_check"] is None
    assert values["figures"] == ["theorem.png"]
    assert (folder / "theorem.png").read_bytes().startswith(b"\x89PNG")
    assert (values["instances"], values["seed"]) == (12, 0)
    assert values["max_equality_error"] < 1e-12
    assert values["max_bound_violation"] < 1e-14
    assert values["counter_example_gap"] < 1e-14
    found = theorem_checks.check_random_instances(12, 0)
    assert values["min_strict_gap"] == found.min_strict_gap > 0.01
    assert len(values["heterogeneity"]["gap"]) == len(values["heterogeneity"]["scale"])
    curve = values["rank_curve"]
    assert len(curve["rank"]) == len(curve["hive_loss"])
    assert curve["headwise_loss"] < curve["shared_loss"]


def test_model_is_checked_with_its_own_retrieval(midus, model, text, tmp_path):
    out = tmp_path / "out"
    result = midus(
        "analyze", "theorem", model, "--instances", 3, "--text", text, "--tokens", 40, "-o", out
    )
    assert result.code == 0, result.err
    values = json.loads((out / "theorem.json").read_text())
    assert values.keys() >= set(COMMON)
    assert (values["model"], values["model_id"]) == (str(model), model_id(model))
    check = values["model_check"]
    assert (check["block"], check["num_heads"], check["num_tokens"]) == (4, 4, 40)
    assert check["text"] == str(text)
    assert check["max_equality_error"] < 1e-9
    assert check["max_bound_violation"] < 1e-9
    assert check["min_strict_gap"] == check["common_retrieval"]["theorem"]["gap"] > 0
    own = check["own_retrieval"]
    for part in (
        "block 4 of the model, 4 heads, 40 tokens",
        f"{own['shared_loss']:.4f} shared, {own['headwise_loss']:.4f} head-wise",
        "Theorem 1 asks for one A",
        "theorem.png",
    ):
        assert part in result.out


def test_block_is_chosen_by_its_final_index(midus, model, tmp_path):
    # The packaged text is all unknown words to this tokenizer: one token, over and over.
    out = tmp_path / "out"
    options = ("--instances", 1, "--tokens", 20, "--block", 1, "-o", out, "--json")
    result = midus("analyze", "theorem", model, *options)
    assert result.code == 0, result.err
    assert json.loads(result.out)["model_check"]["block"] == 1


def test_statement_that_fails_ends_with_code_1(midus, tmp_path, monkeypatch):
    monkeypatch.setattr(theorem_checks, "sharing_gap", lambda retrieval, target: target.sum() * 0)
    result = midus("analyze", "theorem", "--instances", 3, "-o", tmp_path / "out")
    assert result.code == 1
    assert result.err.startswith("midus: on random instances an equality is off by")
    assert json.loads((tmp_path / "out" / "theorem.json").read_text())["max_equality_error"] > 1e-3


def test_bad_input_is_refused(midus, base, model, text, tmp_path):
    out = ("-o", tmp_path / "out")
    assert_refused(midus("analyze", "theorem", "--instances", 0, *out), "instances=0")
    assert_refused(midus("analyze", "theorem", "--seed", -1, *out), "seed=-1")
    for file in (text, text / "below"):
        # Both are wrong; the folder is looked at before the work.
        refused = midus("analyze", "theorem", "--instances", 0, "-o", file)
        assert_refused(refused, "words.txt is a file; give a folder with --output")
    assert_refused(midus("analyze", "theorem", "--block", 1, *out), "block='1'", "MODEL")
    few = ("--instances", 1, *out)
    refused = midus("analyze", "theorem", model, "--block", 2, *few)
    assert_refused(refused, "block=2", "no memory block", "1, 4")
    assert_refused(midus("analyze", "theorem", base, *few), "no memory blocks")
    missing = midus("analyze", "theorem", model, "--text", tmp_path / "none.txt", *few)
    assert_refused(missing, "none.txt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100.0 %"), (0.3704, "37.0 %"), (1e-5, "0.001 %"), (0.0, "0 %")]
)
def test_shares_are_printed_without_powers_of_ten(share, text):
    assert _percent(share) == text

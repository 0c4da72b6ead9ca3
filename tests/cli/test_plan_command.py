"""`midus plan`: tables, JSON, and one sentence for what cannot be used."""

import json

import pytest
from tiny import save_base

from midus.efficiency import cost_checked

SMALL = ("plan", "--shape", "tiny", "--methods", "base,midus:hml", "--sequence", "64")


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    monkeypatch.setattr(cost_checked, "read_errors", lambda: None)


def test_plan_prints_memory_times_serving_and_the_answer(midus):
    done = midus(*SMALL, "--gpus", "1,16", "--price", "2")
    assert done.code == 0
    for words in (
        "training memory, GB on each GPU",
        "training on 1,500,000,000 tokens at $2 a GPU hour",
        "serving on one GPU",
        "base fits on one H200 (",
        "midus:hml fits on one H200 (",
        "on paper",
        "have not been compared",
    ):
        assert words in done.out
    assert "example" not in done.out
    assert sum(line.startswith("midus:hml  ") for line in done.out.splitlines()) == 5


def test_plan_says_what_is_an_example_and_what_was_not_measured(midus, monkeypatch):
    found = {"columns": {"train_gb": {"values": 3, "mean": 1.5, "worst": 2.0}}}
    monkeypatch.setattr(cost_checked, "read_errors", lambda: found)
    done = midus(*SMALL, "--gpu", "L40S")
    assert "a GPU hour is an example" in done.out
    assert "training memory 1.5 % (worst 2.0, 3 values)" in done.out
    assert "L40S is predicted from its data sheet" in done.out
    assert "on paper" not in done.out


def test_plan_marks_times_that_are_coarse_or_the_hosts(midus):
    done = midus("plan", "--shape", "tiny", "--methods", "base,midus:linear", "--sequence", "64")
    assert "times bound by the host" in done.out
    assert "times of linear are coarse" in done.out
    assert "coarse" not in midus(*SMALL).out


def test_plan_shows_small_models_in_millions(midus):
    out = midus(*SMALL).out
    assert "0.00 B" not in out
    assert " M  " in out


def test_plan_without_fused_blocks_needs_more_memory(midus):
    fused, plain = (
        json.loads(midus(*SMALL, "--json", *flags).out) for flags in ((), ("--plain-blocks",))
    )
    assert fused["fused_blocks"]
    assert not plain["fused_blocks"]
    kept = [v["methods"][0]["training"][0]["memory"]["activations_gb"] for v in (fused, plain)]
    assert kept[0] < kept[1]


def test_plan_json_holds_every_column(midus):
    done = midus(*SMALL, "--tokens", "1e6", "--gpus", "1,8", "--json")
    values = json.loads(done.out)
    base, hml = values["methods"]
    assert [training["gpus"] for training in base["training"]] == [1, 8]
    assert hml["params"]["trainable"] < base["params"]["trainable"]
    one = hml["training"][0]
    assert one["hours"] == pytest.approx(1e6 / one["tokens_s"] / 3600)
    assert one["cost"] == pytest.approx(one["hours"] * 3.5)
    assert one["tokens_per_iteration"] == 64 * 16
    assert set(hml["serving"]) >= {"weights_gb", "value_caches_gb", "decode_tokens_s", "prefill_ms"}
    assert hml["serving"]["value_caches_gb"] > 0
    assert base["serving"]["value_caches_gb"] == 0
    assert values["measured_error"] is None


def test_plan_reads_a_checkpoint_and_memory_sizes(midus, tmp_path):
    save_base(tmp_path)
    command = ("plan", "--model", tmp_path, "--methods", "midus:hml", "--json")
    few, many = (
        json.loads(midus(*command, "--num-subkeys", n).out)["methods"][0]["params"]["trainable"]
        for n in (8, 16)
    )
    # Keys of 4 numbers for 4 heads and two sides, and a table 8 wide, in 2 blocks.
    assert many - few == 2 * (2 * 4 * 8 * 4 + (256 - 64) * 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "h20"), "did you mean h200"),
        (("--tokens", "many"), "tokens=many must be a number of at least 1, such as 1.5e9"),
        (("--tokens", "-1"), "tokens=-1 must be a number of at least 1"),
        (("--tokens", "0.3"), "tokens=0.3 must be a number of at least 1"),
        (("--methods", "midas"), "method='midas' is unknown"),
        (("--methods", "midus:hlm"), "hlm"),
        (("--gpus", "0"), "gpus='0'"),
        (("--precision", "fp8"), "precision='fp8' is unknown"),
        (("--gpus", "9"), "gpus=9 is no number of whole nodes"),
        (("--gpus", "8,20"), "such as 24"),
        (("--price", "0"), "price=0.0 must be a number of at least 0.001, such as 2.5"),
        (("--price", "-1"), "price=-1.0 must be a number of at least 0.001, such as 2.5"),
        (("--context", "0"), "context=0"),
        (("--top-k", "65"), "top_k=65 is more than num_subkeys=64"),
        (("--model", "somewhere"), "either --shape"),
        (("--shape", "llama-3.1-8"), "did you mean llama-3.1-8b"),
    ],
)
def test_plan_refuses_what_it_cannot_use(midus, arguments, words):
    done = midus(*SMALL, *arguments)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


def test_plan_refuses_a_grown_model(midus, tmp_path):
    save_base(tmp_path / "base")
    assert midus("upscale", tmp_path / "base", tmp_path / "grown").code == 0
    done = midus("plan", "--model", tmp_path / "grown")
    assert done.code == 2
    assert "up-scaled already" in done.err

"""`midus bench layer`: its columns compute the same layer, and it checks before it times."""

import json

import pytest
import torch

from midus import MidusError
from midus.efficiency import layer as bench
from midus.efficiency.timing import Timer, forward_backward
from midus.ops import headwise_memory, product_key_topk

SHAPE = bench.LayerShape(
    num_heads=3, head_dim=8, head_width=6, num_subkeys=8, top_k=3, latent_dim=5
)
CPU = torch.device("cpu")


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return bench.random_inputs(SHAPE, 7, torch.float64, CPU)


@pytest.mark.parametrize("variant", [bench._naive, bench._paper_training])
def test_every_training_column_has_the_layers_output_and_gradients(inputs, variant):
    grad = torch.randn(7, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(variant(*inputs, 3), headwise_memory(*inputs, 3))
    expected = forward_backward(headwise_memory, inputs, grad, 3)()
    for name, a, b in zip(
        "qrcvp", forward_backward(variant, inputs, grad, 3)(), expected, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tokens", [7, 20])
def test_the_papers_inference_gives_the_layers_output(tokens):
    # On both sides of where it changes the search.
    inputs = bench.random_inputs(SHAPE, tokens, torch.float64, CPU)
    cache = torch.matmul(inputs[3], inputs[4])
    expected = headwise_memory(*inputs, 3)
    torch.testing.assert_close(bench._paper_inference(*inputs[:3], cache, 3), expected)


def test_both_searches_of_the_paper_find_the_best(inputs):
    slots, scores = product_key_topk(*inputs[:3], 3)
    for search in (bench._two_stage, bench._cartesian):
        found, weights = search(*inputs[:3], 3)
        assert torch.equal(found, slots)
        torch.testing.assert_close(weights, scores.softmax(-1))


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    real = bench.headwise_memory
    monkeypatch.setattr(
        bench, "headwise_memory", lambda *a, **k: real(*a, **k) * (1.01 if len(a) == 6 else 1)
    )
    with pytest.raises(MidusError, match="nothing is timed"):
        next(bench.measure_layer(SHAPE, [4], torch.float32, CPU))


def test_command_writes_a_complete_report(midus, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(Timer, "bandwidth", lambda self: 1e10)
    path = tmp_path / "layer.json"
    result = midus(
        "bench", "layer", "--shape", "smollm2-135m", "--tokens", "1,3", "--num-subkeys", "8",
        "--dtype", "float32", "--json", path,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "forward and backward, median ms" in result.out
    assert "the same to the bit" in result.out
    report = json.loads(path.read_text())
    assert {"hardware", "versions", "commit", "date", "command", "rows"} <= set(report)
    assert [row["tokens"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        times = [f"{name}_{kind}_ms" for name in ("naive", "compiled", "paper", "ours")
                 for kind in ("fwd", "fwdbwd")]  # fmt: skip
        assert all(row[name] > 0 for name in (*times, "floor_fwd_ms"))
        assert row["rel_error"] < 1e-5
        assert row["backward_repeatable"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--tokens", "1,a"], "tokens='1,a'"),
        (["--tokens", "0"], "tokens='0'"),
        (["--shape", "llama"], "shape 'llama' is unknown"),
        (["--dtype", "int8"], "dtype='int8'"),
        (["--device", "tpu"], "device='tpu'"),
        (["--top-k", "9", "--num-subkeys", "8"], "top_k=9 is more than num_subkeys=8"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(midus, options, part):
    result = midus("bench", "layer", *options)
    assert result.code == 2
    assert result.err.startswith("midus: ")
    assert part in result.err
    assert "Traceback" not in result.err

"""`midus bench efficiency`, `prefill`, `sweep`, `decode` on a tiny model, as a user runs them."""

import json

import pytest
from tiny import save_base

COLUMNS = {
    "method", "memory", "placement", "label", "params_trainable", "params_total", "train_gb",
    "infer_gb", "train_s_per_iter", "train_s_spread", "train_tokens_per_iter",
    "decode_eager_tok_s", "decode_compiled_tok_s", "generate_fast_tok_s", "prefill_ms",
    "prefill_spread_ms", "prefill_gb", "kv_cache_bytes_per_token", "attn_implementation",
    "optimizer", "dtype", "oom", "errors",
}  # fmt: skip


def read(path):
    result = json.loads(path.read_text())
    assert {"hardware", "versions", "commit", "date", "command", "protocol", "rows"} <= set(result)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for row in result["rows"]:
        assert set(row) >= COLUMNS
        assert row["oom"] == []
        assert row["errors"] == {}
    return result


def test_efficiency_has_a_row_a_method_with_every_column(midus, tmp_path):
    path = tmp_path / "out" / "eff.json"
    result = midus(
        "bench", "efficiency", "--shape", "tiny", "--methods", "base,llama_pro,midus:hml",
        "--repeats", "2", "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert result.code == 0, result.err
    report = read(path)
    assert report["protocol"]["base"] == "tiny"
    assert report["protocol"]["accumulation"] == 2
    assert report["protocol"]["loss_chunk"] == 1024
    base, copies, hml = report["rows"]
    assert [base["method"], copies["method"], hml["method"]] == ["base", "llama_pro", "midus"]
    assert base["params_trainable"] == base["params_total"] == 164_416
    assert (hml["memory"], hml["placement"]) == ("hml", "distributed")
    for row in report["rows"]:
        for column in ("train_s_per_iter", "decode_eager_tok_s", "decode_compiled_tok_s"):
            assert row[column] > 0, column
        assert set(row["prefill_ms"]) == {"8", "32"}
        assert row["train_tokens_per_iter"] == 2 * 32
        assert row["train_gb"] is None  # nothing counts it on a CPU
        assert row["kv_cache_bytes_per_token"] == 128 * (4 if row is base else 6)
    seconds, spread = hml["train_s_per_iter"], hml["train_s_spread"]
    ratio = f"({seconds / base['train_s_per_iter']:.2f}x)"
    wavering = f"{seconds:.3f} ± {spread:.3f}"  # where a ratio would say little
    against = f"{hml['train_s_per_iter'] / copies['train_s_per_iter']:.2f}x"
    (line,) = [x for x in result.out.splitlines() if "MIDUS HML" in x and "distributed" in x]
    assert (wavering if spread > 0.1 * seconds else ratio) in line
    assert line.rstrip().endswith(against)
    assert str(path) in result.out


def test_paper_columns_are_the_papers_and_phases_can_be_left_out(midus, tmp_path, monkeypatch):
    from midus.efficiency import runs
    from midus.efficiency.rows import empty_row

    def pretend(function, job, receive):
        receive("hardware", "a machine")
        receive("rows", [empty_row(point) for point in job.points])

    monkeypatch.setattr(runs, "run_in_process", pretend)
    path = tmp_path / "eff.json"
    result = midus(
        "bench", "efficiency", "--shape", "llama-3.1-8b", "--paper", "--skip", "decode",
        "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert result.code == 0, result.err
    (line,) = [x for x in result.out.splitlines() if "MIDUS HML" in x and "distributed" in x]
    assert line.split()[-4:] == ["0.42", "8.45", "34.8", "5.05"]
    assert "RTX 6000 Blackwell" in result.out
    assert len(json.loads(path.read_text())["rows"]) == 7
    assert "decode_eager" in json.loads(path.read_text())["protocol"]["skip"]


def test_a_shape_is_itself_even_beside_a_folder_of_its_name(midus, tmp_path, monkeypatch):
    save_base(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    options = ("--methods", "base", "--skip", "train,decode,prefill", "--device", "cpu")
    counts = []
    for target in (("--shape", "tiny"), ("--model", "tiny")):
        assert midus("bench", "efficiency", *target, *options, "--json", "out.json").code == 0
        counts.append(json.loads((tmp_path / "out.json").read_text())["rows"][0]["params_total"])
    assert counts[0] == 164_416 != counts[1]


def test_prefill_shows_the_change_against_dus(midus, tmp_path):
    path = tmp_path / "prefill.json"
    result = midus(
        "bench", "prefill", "--methods", "llama_pro,midus:hml", "--prompts", "4,16",
        "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert result.code == 0, result.err
    dus, hml = read(path)["rows"]
    assert set(hml["prefill_ms"]) == {"4", "16"}
    assert hml["train_s_per_iter"] is None
    change = hml["prefill_ms"]["16"] - dus["prefill_ms"]["16"]
    table = result.out.split("change against DUS")[1]
    assert [x.split() for x in table.splitlines() if x.startswith("16 ")] == [
        ["16", "+0.00", f"{change:+.2f}"]
    ]


@pytest.mark.parametrize(
    ("over", "values", "methods", "shown"),
    [
        ("batch", "2,4", "llama_pro", [2, 4]),
        ("sequence", "8,16", "midus:hml", [8, 16]),
        ("top_k", "1,2", "midus:hml", [1, 2]),
        ("placement", "top_heavy,distributed", "llama_pro", ["top_heavy", "llama_pro"]),
    ],
)
def test_sweeps_have_a_row_a_value(midus, tmp_path, over, values, methods, shown):
    path = tmp_path / "sweep.json"
    result = midus(
        "bench", "sweep", "--over", over, "--values", values, "--methods", methods,
        "--repeats", "1", "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = read(path)["rows"]
    assert [row["value"] for row in rows] == shown
    assert all(row["train_s_per_iter"] > 0 for row in rows)
    assert all((row["decode_compiled_tok_s"] is not None) == (over == "top_k") for row in rows)


def test_decode_has_a_row_for_every_batch_and_context(midus, tmp_path):
    path = tmp_path / "decode.json"
    result = midus(
        "bench", "decode", "--batch", "1,2", "--context", "4,8", "--methods", "midus:hml",
        "--repeats", "1", "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = read(path)["rows"]
    assert [(r["context"], r["batch"]) for r in rows] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert [r["kv_cache_bytes"] // r["kv_cache_bytes_per_token"] for r in rows] == [4, 8, 8, 16]


@pytest.mark.parametrize(
    ("command", "options", "part"),
    [
        ("efficiency", ["--methods", "midas"], "method='midas'"),
        ("efficiency", ["--methods", "midus:pkn"], "pkn"),
        ("efficiency", ["--methods", "midus@middle"], "placement='middle'"),
        ("efficiency", ["--methods", "base@top_heavy"], "inserts nothing"),
        ("efficiency", ["--prompts", "8,x"], "prompts='8,x'"),
        ("efficiency", ["--shape", "huge"], "shape 'huge' is unknown"),
        ("efficiency", ["--shape", "tiny", "--model", "there"], "exclude each other"),
        ("efficiency", ["--skip", "sleep"], "skip='sleep'"),
        ("efficiency", ["--dtype", "int8"], "dtype='int8'"),
        ("efficiency", ["--device", "tpu"], "device='tpu'"),
        ("efficiency", ["--json", "out.png"], "must end in .json"),
        ("efficiency", ["--json", "/proc/none/out.json"], "cannot be written"),
        ("efficiency", ["--methods", "midus:hml,midus@distributed"], "twice"),
        ("efficiency", ["--methods", "base", "--hf-compiled", "llama_pro"], "methods does not"),
        ("prefill", ["--prompts", "0"], "prompts='0'"),
        ("sweep", ["--over", "depth"], "over='depth'"),
        ("sweep", ["--over", "batch", "--micro-batch", "2"], "micro_batch=2"),
        ("sweep", ["--over", "top_k", "--values", "x"], "values='x'"),
        ("sweep", ["--over", "top_k", "--values", "65"], "top_k=65 is more than"),
        ("sweep", ["--over", "placement", "--values", "middle"], "placement='middle'"),
        ("decode", ["--batch", "a"], "batch='a'"),
        ("decode", ["--context", "-1"], "context='-1'"),
    ],
)
def test_wrong_options_of_model_benchmarks_are_refused(midus, command, options, part):
    result = midus("bench", command, *options)
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("midus: ")
    assert part in result.err
    assert "Traceback" not in result.err

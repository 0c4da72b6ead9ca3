"""What a user can get wrong: one sentence on stderr, exit code 2, no traceback, nothing written."""

import json

import pytest
from tiny import save_base

OUT = "OUT"


@pytest.fixture
def base(tmp_path):
    save_base(tmp_path / "base")
    return tmp_path / "base"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_refused(result, *parts):
    assert result.code == 2, result.out + result.err
    assert result.err.startswith("midus: ")
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err
    assert "Traceback" not in result.out + result.err


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--method", "midas"], ["method='midas' is unknown", "midus"]),
        (["--memory", "hlm"], ["'hlm' is unknown", "hml"]),
        (["--placement", "middle"], ["'middle' is unknown", "bottom_heavy"]),
        (["--top-k", "9", "--num-subkeys", "8"], ["top_k=9 is more than num_subkeys=8"]),
        (["--top-k", "0"], ["top_k=0"]),
        (["--latent-dim", "-3"], ["latent_dim=-3"]),
        (["--positions", "9"], ["9, outside the final stack of 5 blocks"]),
        (["--positions", "-1"], ["-1, outside"]),
        (["--positions", "1,1"], ["repeats an index"]),
        (["--positions", "4"], ["no base block after it"]),
        (["--positions", "1;2"], ["'1;2' is not a list of whole numbers"]),
        (["--positions", "1", "--placement", "top_heavy"], ["exclude each other"]),
        (["--positions", "1", "--inserted", "2"], ["num_inserted=2 does not match"]),
        (["--inserted", "5"], ["num_inserted=5 is out of range for a base of 4 blocks"]),
        (["--inserted", "0"], ["num_inserted=0"]),
        (["--query-norm", "rms"], ["query_norm='rms'"]),
        (["--dtype", "int8"], ["dtype='int8' is unknown", "bfloat16"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options(midus, base, tmp_path, options, parts):
    assert_refused(midus("upscale", base, tmp_path / OUT, *options), *parts)
    assert not (tmp_path / OUT).exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "phi3"}, "model family 'phi3' is not supported; known families: llama"),
        ({"model_type": None}, "is not supported; known families"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "not a multiple of the number of"),
        ({"num_hidden_layers": 6}, "has weights of 4 blocks, but its config.json says 6"),
    ],
    ids=str,
)
def test_bad_configs(midus, base, tmp_path, changes, part):
    edit_config(base, **changes)
    assert_refused(midus("upscale", base, tmp_path / OUT, "--num-subkeys", 8), part)


def test_broken_json(midus, base, tmp_path):
    (base / "config.json").write_text("{")
    assert_refused(midus("upscale", base, tmp_path / OUT), "config.json cannot be read")


@pytest.mark.parametrize("command", ["upscale", "verify", "generate"])
@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda path: path.unlink(), "has no weights"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "not a whole safetensors file"),
        (lambda path: path.rename(path.with_name("pytorch_model.bin")), "pickle weights only"),
    ],
    ids=["missing", "truncated", "pickle"],
)
def test_bad_weights(midus, base, tmp_path, command, damage, part):
    damage(base / "model.safetensors")
    rest = {
        "upscale": [tmp_path / OUT],
        "verify": [base],
        "generate": ["--prompt", "w5"],
    }[command]
    assert_refused(midus(command, base, *rest), part)


def test_missing_shard(midus, tmp_path):
    save_base(tmp_path / "base", shard="20KB")
    next((tmp_path / "base").glob("*.safetensors")).unlink()
    assert_refused(midus("upscale", tmp_path / "base", tmp_path / OUT), "is missing")


def test_existing_output(midus, base, tmp_path):
    assert_refused(midus("upscale", base, base), "exists; choose another folder")
    assert_refused(midus("upscale", base, base, "--overwrite"), "is the model that is being read")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one").touch()
    assert_refused(
        midus("upscale", base, tmp_path / "letters", "--overwrite"), "is not a model folder"
    )
    assert_refused(midus("upscale", base, tmp_path / "letters" / "one"), "exists")


def test_another_base(midus, base, tmp_path):
    save_base(tmp_path / "other", seed=9)
    midus("upscale", base, tmp_path / "delta", "--num-subkeys", 8, "--delta")
    for command in (
        ("merge", tmp_path / "delta", tmp_path / OUT, "--base", tmp_path / "other"),
        ("verify", tmp_path / "other", tmp_path / "delta"),
        ("generate", tmp_path / "delta", "--prompt", "w5", "--base", tmp_path / "other"),
    ):
        assert_refused(midus(*command), "is not the base of this model", "sha256-rows:")


def test_merging_what_is_no_delta(midus, base, tmp_path):
    midus("upscale", base, tmp_path / "full", "--num-subkeys", 8)
    for folder in (base, tmp_path / "full"):
        assert_refused(midus("merge", folder, tmp_path / OUT), "is not a delta checkpoint")


def test_no_disk_space(midus, base, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    assert_refused(midus("upscale", base, tmp_path / OUT, "--num-subkeys", 8), "0.00 GB free")


def test_disk_that_fills_up_while_writing(midus, base, tmp_path, monkeypatch):
    import errno

    from midus.upscaling import stored

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stored, "_save_tensors", fail)
    result = midus("upscale", base, tmp_path / OUT, "--num-subkeys", 8)
    assert_refused(result, "no space left on the disk")
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


def test_upscaling_twice(midus, base, tmp_path):
    midus("upscale", base, tmp_path / "full", "--num-subkeys", 8)
    result = midus("upscale", tmp_path / "full", tmp_path / OUT)
    assert_refused(result, "already has memory blocks")


@pytest.mark.parametrize("target", ["no/such/folder", "nobody/such-model", "gone.gguf"])
@pytest.mark.parametrize("command", ["inspect", "upscale"])
def test_no_such_model(midus, tmp_path, command, target):
    rest = [tmp_path / OUT] if command == "upscale" else []
    assert_refused(midus(command, target, *rest), target)


def test_bad_text(midus, base, tmp_path):
    assert_refused(midus("verify", base, base, "--text", tmp_path / "none.txt"), "cannot be read")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    assert_refused(midus("verify", base, base, "--text", tmp_path / "binary"), "UTF-8")
    (tmp_path / "short.txt").write_text("w5")
    assert_refused(midus("verify", base, base, "--text", tmp_path / "short.txt"), "two tokens")


def test_bad_generation(midus, base):
    assert_refused(midus("generate", base, "--prompt", ""), "prompt is empty")
    assert_refused(midus("generate", base, "--prompt", "w5", "--chat"), "no chat template")
    assert_refused(midus("generate", base, "--prompt", "w5", "--device", "gpu"), "device")
    assert midus("generate", base).code == 2
    assert midus("generate", base, "--prompt", "w5", "--max-new-tokens", 0).code == 2


def test_missing_tokenizer(midus, base):
    for path in base.glob("tokenizer*"):
        path.unlink()
    assert_refused(midus("generate", base, "--prompt", "w5"), "no usable tokenizer")

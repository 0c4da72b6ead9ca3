"""What a user can get wrong: one sentence on stderr, exit code 2, no traceback, nothing written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
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
        (["--num-subkeys", "99999999999999999999"], ["num_subkeys=99999999999999999999"]),
        (["--num-subkeys", "65536", "--latent-dim", "65536"], ["MB and the disk has"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--seed", "281474976710656"], ["seed=281474976710656"]),
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
        ({"model_type": None}, "names no model_type (it says None)"),
        ({"model_type": ["llama"]}, "names no model_type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "the base is quantized"),
        ({"vocab_size": 120}, "of shape [99, 32], and its config calls for [120, 32]"),
        ({"hidden_size": 64}, "and its config calls for"),
        ({"num_hidden_layers": 3}, "belongs to block 3, but the base's config has 3 blocks"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "not a multiple of the number of"),
        ({"num_hidden_layers": 6}, "lacks the tensor 'model.layers.4.self_attn.q_proj.weight'"),
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


@pytest.mark.parametrize(
    "lost", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_a_missing_tensor(midus, base, tmp_path, lost):
    tensors = load_file(base / "model.safetensors")
    del tensors[lost]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    for command in (("upscale", base, tmp_path / OUT), ("generate", base, "--prompt", "w5")):
        assert_refused(midus(*command), f"lacks the tensor '{lost}'")


def test_weights_of_whole_numbers(midus, base, tmp_path):
    tensors = {n: t.to(torch.int8) for n, t in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert_refused(midus("upscale", base, tmp_path / OUT), "up-scale the unquantized model")


def test_an_index_with_odd_names(midus, base, tmp_path):
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": 5}}))
    assert_refused(midus("upscale", base, tmp_path / OUT), "names 5, not a file beside it")


def test_the_base_is_never_overwritten(midus, tmp_path):
    outer = tmp_path / "outer"
    save_base(outer)
    save_base(outer / "base")
    for kind in ("--delta", "--full"):
        result = midus("upscale", outer / "base", outer, "--overwrite", kind, "--num-subkeys", 8)
        assert_refused(result, "holds", "base")
    midus("upscale", outer / "base", tmp_path / "delta", "--num-subkeys", 8, "--delta")
    for target, part in (
        (outer / "base", "is or holds"),
        (outer, "holds base"),
        (tmp_path / "delta", "is or holds"),
    ):
        assert_refused(midus("merge", tmp_path / "delta", target, "--overwrite"), part)
    assert midus("merge", tmp_path / "delta", tmp_path / "merged").code == 0


@pytest.mark.parametrize("kind", ["notes", "checkpoints", "a config of something else"])
def test_what_is_no_part_of_a_model_is_never_overwritten(midus, base, tmp_path, kind):
    own = tmp_path / "own"
    save_base(own)
    if kind == "notes":
        (own / "notes.txt").write_text("mine")
    elif kind == "checkpoints":
        (own / "checkpoint-500").mkdir()
    else:
        (own / "config.json").write_text('{"my": "app"}')
    before = sorted(path.name for path in own.iterdir())
    result = midus("upscale", base, own, "--overwrite", "--num-subkeys", 8)
    assert_refused(result, "which is no part of a model, and would be lost")
    assert sorted(path.name for path in own.iterdir()) == before


def test_places_that_cannot_be_written(midus, base, tmp_path):
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        result = midus("upscale", base, target, "--num-subkeys", 8)
        assert_refused(result, "cannot be written")


def test_options_that_would_be_ignored(midus, base, tmp_path):
    midus("upscale", base, tmp_path / "full", "--num-subkeys", 8)
    assert_refused(midus("inspect", tmp_path / "full", "--top-k", 2), "is up-scaled already")
    result = midus("generate", tmp_path / "full", "--prompt", "w5", "--base", base)
    assert_refused(result, "is no delta; leave it out")


@pytest.mark.parametrize(
    "changes",
    [{"memory_positions": "x"}, {"memory": []}, {"upscaling": []}, {"memory": {"n": 3}}],
    ids=str,
)
def test_a_damaged_up_scaled_config(midus, base, tmp_path, changes):
    midus("upscale", base, tmp_path / "full", "--num-subkeys", 8)
    edit_config(tmp_path / "full", **changes)
    assert midus("inspect", tmp_path / "full").code == 2


def test_models_with_other_vocabularies(midus, base, tmp_path):
    save_base(tmp_path / "small", vocab_size=20)
    (tmp_path / "text").write_text("w5 w50 w60")
    result = midus("verify", base, tmp_path / "small", "--text", tmp_path / "text")
    assert_refused(result, "has a vocabulary of 20")


def test_missing_shard(midus, tmp_path):
    save_base(tmp_path / "base", shard="20KB")
    next((tmp_path / "base").glob("*.safetensors")).unlink()
    assert_refused(midus("upscale", tmp_path / "base", tmp_path / OUT), "is missing")


def test_existing_output(midus, base, tmp_path):
    assert_refused(midus("upscale", base, base), "exists; choose another folder")
    assert_refused(midus("upscale", base, base, "--overwrite"), "which is being read")
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
    assert_refused(
        midus("upscale", base, tmp_path / OUT, "--num-subkeys", 8), "the disk has 0.0 MB free"
    )


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
    compare = ("generate", base, "--prompt", "w5", "--compare")
    assert_refused(midus(*compare), "give --fast")
    assert_refused(midus(*compare, "--fast", "--temperature", "1"), "no temperature")
    assert_refused(midus("generate", base, "--prompt", "w5", "--chat"), "no chat template")
    for device in ("gpu", "meta", "cuda:99"):
        result = midus("generate", base, "--prompt", "w5", "--device", device)
        assert_refused(result, f"device='{device}' cannot be used here")
    assert midus("generate", base).code == 2
    assert midus("generate", base, "--prompt", "w5", "--max-new-tokens", 0).code == 2


def test_missing_tokenizer(midus, base):
    for path in base.glob("tokenizer*"):
        path.unlink()
    assert_refused(midus("generate", base, "--prompt", "w5"), "no usable tokenizer")

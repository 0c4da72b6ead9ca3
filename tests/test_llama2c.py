"""examples/convert_llama2c.py: a file of llama2.c and the folder made of it compute the same."""

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import TOLERANCE, relative_error
from torch.nn import functional

ROOT = Path(__file__).parents[1]
STORIES = ROOT.parent / "shared" / "data" / "models" / "stories15M"
DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, CONTEXT = 32, 48, 3, 4, 2, 24
HEAD_DIM = DIM // HEADS
TEXT = ["Once upon a time there was a cat.", "The cat sat on  two mats, and it rained."]

sentencepiece = pytest.importorskip("sentencepiece")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "convert_llama2c", ROOT / "examples" / "convert_llama2c.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT * 20),
            model_writer=file,
            model_type="bpe",
            vocab_size=300,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    return path


def random_weights(vocab: int, tied: bool) -> dict[str, torch.Tensor]:
    """Tensors under llama2.c's names, in the order of its file."""
    generator = torch.Generator().manual_seed(0)
    kv_dim = KV_HEADS * HEAD_DIM
    shapes = {
        "tok_embeddings": (vocab, DIM),
        "attention_norm": (LAYERS, DIM),
        "wq": (LAYERS, DIM, DIM),
        "wk": (LAYERS, kv_dim, DIM),
        "wv": (LAYERS, kv_dim, DIM),
        "wo": (LAYERS, DIM, DIM),
        "ffn_norm": (LAYERS, DIM),
        "w1": (LAYERS, HIDDEN, DIM),
        "w2": (LAYERS, DIM, HIDDEN),
        "w3": (LAYERS, HIDDEN, DIM),
        "norm": (DIM,),
        "freqs_cos": (CONTEXT, HEAD_DIM // 2),
        "freqs_sin": (CONTEXT, HEAD_DIM // 2),
        "output": (vocab, DIM),
    }
    # Large enough that attention differs visibly from token to token.
    weights = {n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()}
    angles = torch.outer(
        torch.arange(CONTEXT).float(),
        10_000 ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM),
    )
    weights |= {"freqs_cos": angles.cos(), "freqs_sin": angles.sin()}
    for name in ("attention_norm", "ffn_norm", "norm"):
        weights[name] += 1
    if tied:
        del weights["output"]
    return weights


def write_llama2c(path: Path, weights: dict[str, torch.Tensor]) -> None:
    vocab = len(weights["tok_embeddings"])
    signed = -vocab if "output" in weights else vocab
    sizes = (DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, signed, CONTEXT)
    with path.open("wb") as file:
        file.write(struct.pack("<7i", *sizes))
        for tensor in weights.values():
            file.write(tensor.numpy().astype("<f4").tobytes())


def rotate_pairs(x, cos, sin):
    """RoPE of llama2.c on [T, heads, head_dim]: neighbouring entries are one complex number."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[: len(x), None], sin[: len(x), None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def llama2c_logits(weights, ids):
    """The forward pass of llama2.c's model.py on one sequence, written out plainly."""

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    w = {name: tensor.double() for name, tensor in weights.items()}
    cos, sin = w["freqs_cos"], w["freqs_sin"]
    x = w["tok_embeddings"][ids]
    length = len(ids)
    mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
    for layer in range(LAYERS):
        h = norm(x, w["attention_norm"][layer])
        q = rotate_pairs((h @ w["wq"][layer].T).view(length, HEADS, HEAD_DIM), cos, sin)
        k = rotate_pairs((h @ w["wk"][layer].T).view(length, KV_HEADS, HEAD_DIM), cos, sin)
        v = (h @ w["wv"][layer].T).view(length, KV_HEADS, HEAD_DIM)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) / HEAD_DIM**0.5 + mask
        attended = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).reshape(length, DIM)
        x = x + attended @ w["wo"][layer].T
        h = norm(x, w["ffn_norm"][layer])
        gate, up = h @ w["w1"][layer].T, h @ w["w3"][layer].T
        x = x + (functional.silu(gate) * up) @ w["w2"][layer].T
    return norm(x, w["norm"]) @ w.get("output", w["tok_embeddings"]).T


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_what_llama2c_computes(script, tokenizer_model, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    weights = random_weights(300, tied)
    write_llama2c(tmp_path / "tiny.bin", weights)
    script.convert(tmp_path / "tiny.bin", tokenizer_model, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.tie_word_embeddings == tied
    ids = torch.randint(3, 300, (CONTEXT,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        actual = model(ids[None]).logits[0]
    expected = llama2c_logits(weights, ids)
    assert relative_error(actual, expected) < TOLERANCE[torch.float32]


def test_leaving_q_and_k_as_they_are_would_be_another_model(script, tokenizer_model, tmp_path):
    """Otherwise the test above could not tell the two kinds of RoPE apart."""
    from transformers import AutoModelForCausalLM

    weights = random_weights(300, tied=True)
    write_llama2c(tmp_path / "tiny.bin", weights)
    script.convert(tmp_path / "tiny.bin", tokenizer_model, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.weight.data.copy_(weights["wq"][index])
        layer.self_attn.k_proj.weight.data.copy_(weights["wk"][index])
    ids = torch.arange(3, 3 + CONTEXT)
    with torch.no_grad():
        actual = model(ids[None]).logits[0]
    assert relative_error(actual, llama2c_logits(weights, ids)) > 0.01


HARD_TEXTS = ["", " x", "a  b   c    d ", "  two\n\nlines\t", "é 日本 🙂", "The cat sat on a mat."]


def check_tokenizer(folder: Path, path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    pieces = sentencepiece.SentencePieceProcessor(str(path))
    assert len(tokenizer) == len(pieces)
    for text in [*HARD_TEXTS, *TEXT]:
        ids = tokenizer(text).input_ids
        assert ids == [pieces.bos_id(), *pieces.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_converted_tokenizer_cuts_text_where_sentencepiece_does(
    script, tokenizer_model, tmp_path
):
    write_llama2c(tmp_path / "tiny.bin", random_weights(300, tied=True))
    script.convert(tmp_path / "tiny.bin", tokenizer_model, tmp_path / "out")
    check_tokenizer(tmp_path / "out", tokenizer_model)


@pytest.mark.parametrize("change", ["short", "later layout"])
def test_other_files_are_refused(script, tokenizer_model, tmp_path, change):
    path = tmp_path / "tiny.bin"
    write_llama2c(path, random_weights(300, tied=True))
    data = path.read_bytes()
    path.write_bytes(data[:-4] if change == "short" else struct.pack("<2i", 0x616B3432, 1) + data)
    message = "fetch it again" if change == "short" else "first layout"
    with pytest.raises(SystemExit, match=message):
        script.convert(path, tokenizer_model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def stories(script, tmp_path_factory):
    if not STORIES.is_dir():
        pytest.skip(f"{STORIES} is not here")
    folder = tmp_path_factory.mktemp("stories15M")
    script.convert(STORIES / "stories15M.bin", STORIES / "tokenizer.model", folder)
    return folder


def test_stories15m_tells_a_story(stories):
    from midus.models.loading import load_model, load_tokenizer

    model, tokenizer = load_model(stories, device="cpu"), load_tokenizer(stories)
    assert sum(p.numel() for p in model.parameters()) == 15_191_712
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    # A story, and not the word salad that unpermuted queries and keys would give.
    assert text.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the "
        "sunshine. One day, she saw a big, red ball in the sky."
    )


def test_stories15m_reads_a_story(stories):
    """Measured: 1.40; with q and k left as the file has them 3.64."""
    from midus.models.loading import load_model, load_tokenizer

    model, tokenizer = load_model(stories, device="cpu"), load_tokenizer(stories)
    story = (
        "Once upon a time, there was a boy named Tom. Tom had a small blue boat. He took the boat "
        "to the pond. The wind was strong and the boat went far away. Tom was sad. A kind dog swam "
        "into the water and brought the boat back. Tom hugged the dog and they became friends."
    )
    ids = tokenizer(story, return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 1.6


def test_stories15m_has_sentencepieces_tokenizer(stories):
    check_tokenizer(stories, STORIES / "tokenizer.model")


def test_stories15m_keeps_the_rotary_tables_of_its_file(stories):
    """The file's own cos and sin are those that the folder's config gives."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(stories)
    half = config.head_dim // 2
    size = config.max_position_embeddings * half
    tables = np.fromfile(STORIES / "stories15M.bin", dtype="<f4")[-2 * size :]
    cos, sin = LlamaRotaryEmbedding(config)(
        torch.zeros(1), torch.arange(config.max_position_embeddings)[None]
    )
    expected = torch.from_numpy(tables.reshape(2, -1, half))
    torch.testing.assert_close(torch.stack((cos[0], sin[0]))[..., :half], expected)

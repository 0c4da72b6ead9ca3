"""Turn a model of llama2.c (stories15M.bin and the like) into a Hugging Face folder.

    python examples/convert_llama2c.py stories15M.bin tokenizer.model runs/stories15M

Reads llama2.c's first file layout: seven int32, then every tensor in float32. Its RoPE turns
neighbouring pairs (0, 1), (2, 3), ... of a head; Hugging Face's turns (0, d/2), (1, d/2 + 1), ...,
so the rows of the query and key projections change places.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

_HEADER = ("dim", "hidden_dim", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "context")
_LATER_LAYOUTS = 0x616B3432  # "ak42", the first word of llama2.c's version 1 and 2 files
_UNKNOWN, _BOS, _EOS = 0, 1, 2


def convert(model_bin: Path, tokenizer_model: Path, out: Path) -> None:
    """Writes config.json, model.safetensors and tokenizer files into ``out``."""
    sizes = read_header(model_bin)
    tensors = read_tensors(model_bin, sizes)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=sizes["dim"],
        intermediate_size=sizes["hidden_dim"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        vocab_size=abs(sizes["vocab_size"]),
        max_position_embeddings=sizes["context"],
        rms_norm_eps=1e-5,
        tie_word_embeddings="lm_head.weight" not in tensors,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        dtype="float32",
    ).save_pretrained(out)
    # llama2.c's models write <s> between two stories, and stop at it.
    GenerationConfig(bos_token_id=_BOS, eos_token_id=[_EOS, _BOS]).save_pretrained(out)
    convert_tokenizer(tokenizer_model, sizes["context"]).save_pretrained(out)
    facts = {name: abs(size) for name, size in sizes.items()}
    print(f"{out}: {sum(t.numel() for t in tensors.values()):,} parameters, {json.dumps(facts)}")


def read_header(path: Path) -> dict[str, int]:
    """The seven sizes; a negative vocab_size says that the head is not the embedding."""
    head = np.fromfile(path, dtype="<i4", count=len(_HEADER))
    if len(head) < len(_HEADER) or head[0] == _LATER_LAYOUTS:
        raise SystemExit(f"{path} is not of llama2.c's first layout; export it with --version 0")
    return dict(zip(_HEADER, map(int, head), strict=True))


def read_tensors(path: Path, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The weights under their Hugging Face names."""
    dim, hidden, layers = sizes["dim"], sizes["hidden_dim"], sizes["num_layers"]
    head_dim = dim // sizes["num_heads"]
    kv_dim = head_dim * sizes["num_kv_heads"]
    vocab = abs(sizes["vocab_size"])
    # Each kind of tensor stands there for all layers at once.
    layout = {
        "model.embed_tokens": (vocab, dim),
        "input_layernorm": (layers, dim),
        "self_attn.q_proj": (layers, dim, dim),
        "self_attn.k_proj": (layers, kv_dim, dim),
        "self_attn.v_proj": (layers, kv_dim, dim),
        "self_attn.o_proj": (layers, dim, dim),
        "post_attention_layernorm": (layers, dim),
        "mlp.gate_proj": (layers, hidden, dim),
        "mlp.down_proj": (layers, dim, hidden),
        "mlp.up_proj": (layers, hidden, dim),
        "model.norm": (dim,),
        "rope_tables": (2, sizes["context"], head_dim // 2),  # cos and sin, which config.json gives
    }
    if sizes["vocab_size"] < 0:
        layout["lm_head"] = (vocab, dim)
    values = np.fromfile(path, dtype="<f4", offset=4 * len(_HEADER))
    wanted = sum(math.prod(shape) for shape in layout.values())
    if len(values) != wanted:
        raise SystemExit(
            f"{path} holds {len(values):,} numbers and its header calls for {wanted:,}; "
            "fetch it again"
        )
    tensors, start = {}, 0
    for name, shape in layout.items():
        size = math.prod(shape)
        block = torch.from_numpy(values[start : start + size].reshape(shape).copy())
        start += size
        if name == "rope_tables":
            continue
        if name.startswith(("model.", "lm_head")):
            tensors[f"{name}.weight"] = block
            continue
        for layer in range(layers):
            weight = block[layer]
            if name.endswith(("q_proj", "k_proj")):
                weight = halves_from_pairs(weight, head_dim)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight.clone()
    return tensors


def halves_from_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from (pair, half) to (half, pair), for the other kind of RoPE."""
    rows, dim = weight.shape
    return weight.view(-1, head_dim // 2, 2, dim).transpose(1, 2).reshape(rows, dim)


def convert_tokenizer(path: Path, context: int) -> PreTrainedTokenizerFast:
    """A sentencepiece BPE model as a fast tokenizer that cuts text at the same places.

    transformers' own conversion orders merges by id and drops the prefix before a space, so it
    cuts runs of spaces otherwise.
    """
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing

    pieces = sentencepiece.SentencePieceProcessor(str(path))
    vocab = {pieces.id_to_piece(i): i for i in range(len(pieces))}
    merges = []
    for piece, i in vocab.items():
        if pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_byte(i):
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-pieces.get_score(i), i, left, right))
    merges = [
        (pieces.id_to_piece(left), pieces.id_to_piece(right))
        for _, _, left, right in sorted(merges)
    ]
    unknown, bos, eos = (pieces.id_to_piece(i) for i in (_UNKNOWN, _BOS, _EOS))
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in (unknown, bos, eos)])
    backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, _BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=unknown,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        model_max_length=context,
    )


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit("usage: python examples/convert_llama2c.py MODEL.bin tokenizer.model OUT")
    convert(*map(Path, sys.argv[1:]))

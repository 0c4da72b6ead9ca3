"""Well-known model shapes without weights, to count parameters and plan before a download."""

from typing import Any

from midus.models.families import find_family


def _shape(model_type: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    names = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "ffn": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv": "num_key_value_heads",
        "head_dim": "head_dim",
        "tied": "tie_word_embeddings",
    }
    return model_type, {names[key]: value for key, value in fields.items()}


_LLAMA3_VOCAB = 128_256
_QWEN_VOCAB = 151_936

# fmt: off
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": _shape("llama", vocab=49_152, hidden=576, ffn=1536, layers=30, heads=9, kv=3, head_dim=64, tied=True),
    "llama-3.2-1b": _shape("llama", vocab=_LLAMA3_VOCAB, hidden=2048, ffn=8192, layers=16, heads=32, kv=8, head_dim=64, tied=True),
    "llama-3.2-3b": _shape("llama", vocab=_LLAMA3_VOCAB, hidden=3072, ffn=8192, layers=28, heads=24, kv=8, head_dim=128, tied=True),
    "llama-3.1-8b": _shape("llama", vocab=_LLAMA3_VOCAB, hidden=4096, ffn=14_336, layers=32, heads=32, kv=8, head_dim=128, tied=False),
    "llama-3.1-70b": _shape("llama", vocab=_LLAMA3_VOCAB, hidden=8192, ffn=28_672, layers=80, heads=64, kv=8, head_dim=128, tied=False),
    "mistral-7b": _shape("mistral", vocab=32_768, hidden=4096, ffn=14_336, layers=32, heads=32, kv=8, head_dim=128, tied=False),
    "qwen2.5-0.5b": _shape("qwen2", vocab=_QWEN_VOCAB, hidden=896, ffn=4864, layers=24, heads=14, kv=2, tied=True),
    "qwen2.5-7b": _shape("qwen2", vocab=152_064, hidden=3584, ffn=18_944, layers=28, heads=28, kv=4, tied=False),
    "qwen3-0.6b": _shape("qwen3", vocab=_QWEN_VOCAB, hidden=1024, ffn=3072, layers=28, heads=16, kv=8, head_dim=128, tied=True),
    "qwen3-8b": _shape("qwen3", vocab=_QWEN_VOCAB, hidden=4096, ffn=12_288, layers=36, heads=32, kv=8, head_dim=128, tied=False),
    "gemma-2-2b": _shape("gemma2", vocab=256_000, hidden=2304, ffn=9216, layers=26, heads=8, kv=4, head_dim=256, tied=True),
    "olmo-2-1b": _shape("olmo2", vocab=100_352, hidden=2048, ffn=8192, layers=16, heads=16, kv=16, tied=False),
}
# fmt: on


def shape_config(name: str) -> Any:
    """The config of a built-in shape."""
    model_type, fields = SHAPES[name]
    return find_family(model_type).config_class(
        **fields, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )

"""Well-known model shapes without weights, to count parameters and plan before a download."""

from typing import Any

from midus.models.families import find_family

_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)

# Family, then the fields above.
SHAPES: dict[str, tuple[str, tuple[Any, ...]]] = {
    # No model anyone trained: quick on a CPU, for trying commands out.
    "tiny": ("llama", (256, 64, 128, 4, 4, 2, 16, True)),
    "smollm2-135m": ("llama", (49_152, 576, 1536, 30, 9, 3, 64, True)),
    "llama-3.2-1b": ("llama", (128_256, 2048, 8192, 16, 32, 8, 64, True)),
    "llama-3.2-3b": ("llama", (128_256, 3072, 8192, 28, 24, 8, 128, True)),
    "llama-3.1-8b": ("llama", (128_256, 4096, 14_336, 32, 32, 8, 128, False)),
    "llama-3.1-70b": ("llama", (128_256, 8192, 28_672, 80, 64, 8, 128, False)),
    "mistral-7b": ("mistral", (32_768, 4096, 14_336, 32, 32, 8, 128, False)),
    "qwen2.5-0.5b": ("qwen2", (151_936, 896, 4864, 24, 14, 2, None, True)),
    "qwen2.5-7b": ("qwen2", (152_064, 3584, 18_944, 28, 28, 4, None, False)),
    "qwen3-0.6b": ("qwen3", (151_936, 1024, 3072, 28, 16, 8, 128, True)),
    "qwen3-8b": ("qwen3", (151_936, 4096, 12_288, 36, 32, 8, 128, False)),
    "gemma-2-2b": ("gemma2", (256_000, 2304, 9216, 26, 8, 4, 256, True)),
    "olmo-2-1b": ("olmo2", (100_352, 2048, 8192, 16, 16, 16, None, False)),
}


def shape_config(name: str) -> Any:
    """The config of a built-in shape."""
    model_type, values = SHAPES[name]
    fields = {k: v for k, v in zip(_FIELDS, values, strict=True) if v is not None}
    return find_family(model_type).config_class(
        **fields, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )

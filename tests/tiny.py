"""Tiny random models of every family, and the tolerances of the whole suite in one table."""

import pytest
import torch

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.config import BYPASSES
from midus.models import FAMILIES

# Largest difference allowed between two ways to compute the same thing, relative to the largest
# value compared. float32: sums in another order; float64: the same, far smaller.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}

VOCAB = 99
MEMORY = MemoryConfig(num_subkeys=8, top_k=4)


def tiny_config(family: str = "llama", **overrides):
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        # Large enough that attention and logits differ visibly between tokens.
        "initializer_range": 0.3,
    }
    if family.startswith("gemma"):
        fields["sliding_window"] = 8
    if family == "olmo2":
        del fields["head_dim"]  # it has no such field: hidden_size // num_attention_heads
    return FAMILIES[family].config_class(**{**fields, **overrides})


def tiny_base(family: str = "llama", seed: int = 0, **overrides):
    torch.manual_seed(seed)
    return FAMILIES[family].causal_lm_class(tiny_config(family, **overrides)).eval()


def fill_tables(model, scale: float = 1.0, seed: int = 1):
    """Gives tables, and bypasses, which start at zero too, random values: memory blocks speak."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("latent_values", "values.values", "bypass.weight")):
            values = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data.copy_(values.to(parameter.dtype))
    return model


def grown(family: str = "llama", filled: bool = True, memory: MemoryConfig = MEMORY, **overrides):
    """An up-scaled tiny model, by default with filled tables."""
    model = upscale(tiny_base(family, **overrides), UpscaleConfig(memory=memory))
    return fill_tables(model) if filled else model


def prompt_ids(batch: int = 1, length: int = 12, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def relative_error(actual, expected) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def save_base(folder, family: str = "llama", dtype=torch.float32, shard=None, **overrides):
    """A tiny base as users have them: weights, config, tokenizer, card with a licence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    base = tiny_base(family, **overrides).to(dtype)
    base.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCAB))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    return base


def load(folder, **options):
    """A stored model with its weights in fresh memory, where products have the same last bits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


every_family = pytest.mark.parametrize("family", list(FAMILIES))
each_bypass = pytest.mark.parametrize("bypass", BYPASSES[1:])
every_bypass = pytest.mark.parametrize("bypass", BYPASSES)

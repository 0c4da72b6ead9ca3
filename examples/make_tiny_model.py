"""Write a tiny random Llama that reads bytes: something to try every command on in seconds.

python examples/make_tiny_model.py runs/tiny
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_EOS = "<eos>"


def make_tiny_model(out: Path) -> None:
    """Writes model and tokenizer into ``out``; the same bytes each time."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each of the 256 bytes
    vocab = {token: i for i, token in enumerate([_EOS, *letters])}
    backend = Tokenizer(models.BPE(vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_EOS, pad_token=_EOS)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocab[_EOS],
        pad_token_id=vocab[_EOS],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {model.num_parameters():,} parameters, {len(vocab)} tokens")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/make_tiny_model.py OUT")
    make_tiny_model(Path(sys.argv[1]))

"""Make a base of random weights, of any width and depth, with the tokenizer of another model.

    python examples/new_base.py smollm2-135m 384 8 runs/new_base

Its weights are as transformers starts them; studies/relative_rate.yaml trains it first.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from midus.models.loading import load_tokenizer

_HEAD_DIM = 64


def new_base(source: str, width: int, num_blocks: int, out: Path, seed: int = 0) -> None:
    """Writes a Llama of that width and depth and the tokenizer of ``source`` into ``out``."""
    if width < _HEAD_DIM or width % _HEAD_DIM:
        raise SystemExit(f"a width of {width}: give a multiple of {_HEAD_DIM}")
    tokenizer = load_tokenizer(source)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=8 * width // 3 // _HEAD_DIM * _HEAD_DIM,
        num_hidden_layers=num_blocks,
        num_attention_heads=width // _HEAD_DIM,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {num_blocks} blocks of width {width}, {model.num_parameters():,} parameters")


if __name__ == "__main__":
    if len(sys.argv) != 5 or not (sys.argv[2].isdigit() and sys.argv[3].isdigit()):
        raise SystemExit("usage: python examples/new_base.py MODEL WIDTH BLOCKS OUT")
    new_base(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))

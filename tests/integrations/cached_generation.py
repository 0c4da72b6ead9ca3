"""Generates with one of transformers' caches on a GPU, and exits with 0 if the tokens are right.

A crash of the interpreter, which a cache may end in, is then one failing test and no more.
"""

import sys

import torch
from tiny import grown, prompt_ids, tiny_base

if __name__ == "__main__":
    kind, cache = sys.argv[1:]
    model = (grown() if kind == "grown" else tiny_base()).cuda().eval()
    model.generation_config.eos_token_id = None
    ids = expected = prompt_ids(1).cuda()
    with torch.no_grad():
        for _ in range(8):
            chosen = model(expected, use_cache=False).logits[:, -1].argmax(-1)
            expected = torch.cat([expected, chosen[:, None]], dim=1)
    found = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation=cache)
    sys.exit(0 if torch.equal(found, expected) else "other tokens than without a cache")

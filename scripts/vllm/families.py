"""Tiny random models of every family and memory layer: vLLM's tokens are transformers'.

    python scripts/vllm/families.py --only qwen3 llama:pkm

Tables are filled, so that memory speaks. One vLLM after the other, in float32, about half a minute
each. Ends with code 1 if a token differs where the likeliest two are not within 1e-3.
"""

import argparse
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from greedy import MARGIN

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.memory import MEMORY_LAYERS
from midus.models import FAMILIES

VOCAB = 256
NEW_TOKENS = 24
LENGTHS = (5, 40, 150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="family, or family:memory")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes, a CPU each")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        check(*options.run.split(":"), options.tensor_parallel)
        return
    cases = [f"{family}:hml" for family in FAMILIES]
    cases += [f"llama:{kind}" for kind in MEMORY_LAYERS if kind != "hml"]
    wanted = {name if ":" in name else f"{name}:hml" for name in options.only or []}
    failed = []
    for case in cases:
        if wanted and case not in wanted:
            continue
        # A process each: vLLM keeps what it holds until its process ends.
        ranks = ["--tensor-parallel", str(options.tensor_parallel)]
        result = subprocess.run([sys.executable, __file__, "--run", case, *ranks])
        failed += [case] if result.returncode else []
    if failed:
        sys.exit(f"not transformers' tokens: {', '.join(failed)}")


def make_model(family: str, memory: str):
    """A grown model, wide enough for vLLM's attention and with tables that are not zero."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # Large enough that tokens differ visibly.
        "initializer_range": 0.1,
    }
    if family.startswith("gemma"):
        fields["sliding_window"] = 64
    if family == "olmo2":
        del fields["head_dim"]
    torch.manual_seed(0)
    base = FAMILIES[family].causal_lm_class(FAMILIES[family].config_class(**fields)).eval()
    model = upscale(base, UpscaleConfig(memory=MemoryConfig(kind=memory, num_subkeys=8, top_k=4)))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".memory." in name and not parameter.any():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def check(family: str, memory: str, num_ranks: int) -> None:
    if num_ranks > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(num_ranks))))
    from vllm import LLM, SamplingParams

    model = make_model(family, memory)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    expected = [continue_greedily(model, prompt) for prompt in prompts]
    with model.memory_disabled():
        silent = [continue_greedily(model, prompt)[0] for prompt in prompts]
    assert silent != [ids for ids, _ in expected], "the memory says nothing"
    with tempfile.TemporaryDirectory(prefix="midus-vllm-") as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            tensor_parallel_size=num_ranks,
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_seqs=4,
        )
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    problems = []
    for (ids, margins), output in zip(expected, found, strict=True):
        pairs = zip(ids, output.outputs[0].token_ids, strict=True)
        step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if step is not None:
            problems.append(f"token {step}, where the margin is {margins[step]:.2g}")
            if margins[step] > MARGIN:
                print(f"{family}:{memory} differs at {problems[-1]}")
                sys.exit(1)
    told = f"; {len(problems)} part at {', '.join(problems)}" if problems else ""
    print(f"{family}:{memory} has transformers' tokens on {len(prompts)} prompts{told}", flush=True)


@torch.no_grad()
def continue_greedily(model, prompt: list[int]) -> tuple[list[int], list[float]]:
    """New tokens and, at each, by how much the likeliest is likelier than the next; no cache."""
    ids, margins = torch.tensor([prompt]), []
    for _ in range(NEW_TOKENS):
        best = model(ids, use_cache=False).logits[0, -1].log_softmax(-1).topk(2)
        margins.append((best.values[0] - best.values[1]).item())
        ids = torch.cat([ids, best.indices[:1].unsqueeze(0)], 1)
    return ids[0, len(prompt) :].tolist(), margins


if __name__ == "__main__":
    main()

"""Greedy text of two programs, compared: equal, or parted where two tokens are as good as one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from openai import OpenAI

from midus.evaluation.verify import sample_text

# Two orders of the same sums may part where the likeliest two tokens are this near.
MARGIN = 1e-3
NEW_TOKENS = 32
# Short and long: the last two fill more than one page of the KV cache.
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):\n",
    "Nantucket is",
    "Water boils at a temperature of",
    "1 2 3 5 8 13",
    "The opposite of cold is",
    "Dear Sir or Madam,",
    sample_text()[:1200],
    sample_text()[1200:3200],
]


@dataclass(frozen=True)
class Greedy:
    """What transformers continues a prompt with."""

    prompt_ids: list[int]
    new_ids: list[int]
    margins: list[float]
    """Log-probability of the likeliest token less that of the next, at each step."""


def by_transformers(model, tokenizer) -> list[Greedy]:
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        length = inputs.input_ids.shape[1]
        best = torch.stack(output.logits)[:, 0].log_softmax(-1).topk(2).values  # [T, 2]
        answers.append(
            Greedy(
                inputs.input_ids[0].tolist(),
                output.sequences[0, length:].tolist(),
                (best[:, 0] - best[:, 1]).tolist(),
            )
        )
    return answers


def by_server(client: OpenAI, name: str, workers: int) -> list[tuple[list[int], list[int]]]:
    """Tokens of each prompt and of its continuation, so many requests at a time."""

    def ask(prompt: str) -> tuple[list[int], list[int]]:
        answer = client.completions.create(
            model=name,
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        choice = answer.choices[0].model_dump()
        return choice["prompt_token_ids"], choice["token_ids"]

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(ask, PROMPTS))


def compare(expected: list[Greedy], found: list[tuple[list[int], list[int]]]) -> list[dict]:
    """Where the server parts from transformers, and whether it may."""
    parted = []
    for number, (right, (prompt_ids, new_ids)) in enumerate(zip(expected, found, strict=True)):
        assert prompt_ids == right.prompt_ids, "the two tokenizers do not agree"
        pairs = zip(new_ids, right.new_ids, strict=False)
        step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if step is None and len(new_ids) == len(right.new_ids):
            continue
        step = min(len(new_ids), len(right.new_ids)) if step is None else step
        margin = right.margins[min(step, len(right.margins) - 1)]
        parted.append(
            {"prompt": number, "token": step, "margin": margin, "allowed": margin <= MARGIN}
        )
    return parted

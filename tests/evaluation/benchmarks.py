"""Small benchmarks of our own making: as local files, and as the hub has the same documents.

The hub's form is written out by hand, so that a reader which changes a document is found out. And
a byte-level model that can read any of it.
"""

import json
import lzma
import random

import torch
from tiny import tiny_base

NUM_DOCS = 120
_WORDS = (
    "river",
    "stone",
    "lamp",
    "engine",
    "paper",
    "seven",
    "garden",
    "copper",
    "salt",
    "bridge",
)


def words(seed: int, count: int = 6) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def _choices(seed: int, count: int) -> list[str]:
    return [f"{words(100 * seed + i, 2)} {i}" for i in range(count)]


def arc(i):
    question, choices, gold = f"{words(i)}?", _choices(i, 4), i % 4
    local = {"id": f"q{i}", "query": f"Question: {question}\nAnswer:", "choices": choices}
    hub = {"question": question, "choices": {"text": choices, "label": ["A", "B", "C", "D"]}}
    return {**local, "gold": gold}, {**hub, "answerKey": "ABCD"[gold]}


def boolq(i):
    local = {"question": words(i), "answer": i % 3 == 0, "passage": f"{words(i + 1, 12)}."}
    return local, {"question": words(i), "passage": local["passage"], "label": int(i % 3 == 0)}


def commonsense_qa(i):
    choices = {"label": list("ABCDE"), "text": _choices(i, 5)}
    doc = {"question": f"{words(i)}? ", "choices": choices, "answerKey": "ABCDE"[i % 5]}
    return doc, doc


def logiqa(i):
    context, question, options = f"One.Two {words(i)}.", f"{words(i + 7)}?", _choices(i, 4)
    lines = ["abcd"[i % 4], context, question]
    lines += [f"{letter}.{option}" for letter, option in zip("ABCD", options, strict=True)]
    hub = {
        "label": "abcd"[i % 4],
        "context": f"One. Two {words(i)}.",
        "question": question,
        "options": options,
    }
    return "\n".join(lines), hub


def piqa(i):
    doc = {"goal": words(i), "sol1": words(i + 1), "sol2": words(i + 2), "label": i % 2}
    return doc, doc


def winogrande(i):
    doc = {"sentence": f"{words(i)} _ {words(i + 1)}.", "option1": "Ann", "option2": "Bob"}
    return {**doc, "answer": "12"[i % 2]}, {**doc, "answer": "12"[i % 2]}


def mmlu(i):
    subject = "anatomy" if i % 2 else "virology"
    doc = {"question": f" {words(i)}?", "choices": _choices(i, 4), "answer": i % 4}
    return {**doc, "subject": subject}, doc


def gsm8k(i):
    doc = {"question": f"{words(i)}?", "answer": f"{words(i)} <<1+1=2>>\n#### {i},000"}
    return doc, doc


def math(i):
    names = ["Algebra", "Counting & Probability", "Number Theory"]
    hub_names = ["algebra", "counting_and_probability", "number_theory"]
    doc = {"problem": f"{words(i)}?", "solution": f"It is $\\boxed{{{i}}}$.", "level": "Level 1"}
    return {**doc, "type": names[i % 3]}, {**doc, "type": names[i % 3], "part": hub_names[i % 3]}


def race(i):
    questions = [f"{words(i)}  _  .", f"{words(i + 1)}?"]
    options = [_choices(i, 4), _choices(i + 1, 4)]
    answers = ["ABCD"[i % 4], "ABCD"[(i + 1) % 4]]
    local = {"article": words(i, 20), "questions": questions, "options": options}
    problems = [
        {"question": q, "answer": a, "options": o}
        for q, a, o in zip(questions, answers, options, strict=True)
    ]
    return {**local, "answers": answers}, {"article": words(i, 20), "problems": str(problems)}


def triviaqa(i):
    doc = {"question": f"{words(i)}?", "answer": {"value": "Salt", "aliases": ["Salt", "salts"]}}
    return doc, doc


def nq_open(i):
    doc = {"question": words(i), "answer": ["salt", "Copper salt"]}
    return doc, doc


def longbench(i):
    doc = {"context": words(i, 30), "input": "", "answers": [words(i, 8)], "all_classes": None}
    return doc, doc


def wikitext(i):
    # A space after each line and before each heading, as the files have it.
    lines = [f" = {words(i, 2)} = ", " ", f" {words(i)} , {words(i + 1)} @-@ {words(i, 1)} . "]
    lines += [" ", " = = Part = = ", " ", f" ( {words(i + 2)} ) . ", " "]
    return lines, {"page": "\n".join(lines)}


FILES = {
    "arc_easy/test.jsonl": arc,
    "arc_easy/validation.jsonl": arc,
    "boolq/validation.jsonl": boolq,
    "commonsense_qa/validation.jsonl": commonsense_qa,
    "logiqa/Test.txt": logiqa,
    "logiqa/Eval.txt": logiqa,
    "piqa/validation.jsonl": piqa,
    "winogrande/validation.jsonl": winogrande,
    "mmlu/test.jsonl": mmlu,
    "mmlu/dev.jsonl": mmlu,
    "gsm8k/train.jsonl": gsm8k,
    "gsm8k/test.jsonl": gsm8k,
    "math/test.jsonl": math,
    "race/test_high.jsonl": race,
    "triviaqa/validation_wikipedia_nocontext.jsonl": triviaqa,
    "nq_open/validation.jsonl": nq_open,
    "longbench/multi_news.jsonl": longbench,
    "wikitext2/wiki.test.raw": wikitext,
}


def write_benchmarks(folder, num_docs: int = NUM_DOCS):
    """All files, packed as users have them."""
    for name, make in FILES.items():
        path = folder / f"{name}.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [make(i)[0] for i in range(num_docs)]
        if name.endswith(".txt"):
            text = "\n" + "\n\n".join(rows) + "\n"
        elif name.endswith(".raw"):
            text = " \n" + "\n".join(line for lines in rows for line in lines) + "\n"
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows)
        with lzma.open(path, "wt", newline="\n") as file:
            file.write(text)
    return folder


def hub_documents(make, num_docs: int = NUM_DOCS):
    return [make(i)[1] for i in range(num_docs)]


def save_byte_model(folder, seed: int = 0, **overrides):
    """A tiny model that reads bytes, so that any text is text to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    shape = {"vocab_size": len(vocabulary), "max_position_embeddings": 512, **overrides}
    model = tiny_base(seed=seed, **shape)
    torch.manual_seed(seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer

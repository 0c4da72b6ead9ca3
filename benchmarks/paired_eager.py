"""Eager decoding of several methods in turn: what is left of a ratio when the machine wavers.

    python benchmarks/paired_eager.py --shape llama-3.1-8b --json runs/paired_eager.json

`midus bench efficiency` measures one model after another, each in a process of its own. Eager
decoding is bound by Python, and where others share the CPU its rate changes by a third from minute
to minute, so that two rows say little about each other. Here all models are held at once (base and
HML of 8B: 35 GB) and take turns, one short generation each a round; the ratio is taken within a
round, and its median and quartiles over the rounds are printed.
"""

import argparse
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from midus.efficiency.hardware import hardware_name, pick_device
from midus.efficiency.inference import generate_once, prepare_inference, random_prompt
from midus.efficiency.random_model import make_random_model
from midus.efficiency.subjects import parse_subjects
from midus.models.shapes import shape_config
from midus.reports import write_result

PROMPT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--methods", default="base,midus:hml", help="The first is compared with.")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=32, help="Timed in each generation.")
    parser.add_argument("--device", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = pick_device(options.device)
    base_config = shape_config(options.shape)
    subjects = parse_subjects(options.methods)
    models = []
    for subject in track(subjects, "building"):
        config = subject.grown_config(base_config) if subject.method != "base" else base_config
        model = make_random_model(config, device, torch.bfloat16, longest=PROMPT + 1024)
        prepare_inference(model)
        models.append(model)
    prompt = random_prompt(models[0], 1, PROMPT, device)
    rates: list[list[float]] = [[] for _ in models]
    for number in track(range(-1, options.rounds), "rounds"):
        turns = list(zip(models, rates, strict=True))
        for model, own in turns if number % 2 else reversed(turns):
            seconds = generate_once(model.generate, prompt, options.tokens, device)
            if number >= 0:  # the first round warms up
                own.append(options.tokens / seconds)
    rows = []
    for subject, own in zip(subjects, rates, strict=True):
        ratios = [rate / first for rate, first in zip(own, rates[0], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                **subject.names(),
                "decode_eager_tok_s": statistics.median(own),
                "fastest_tok_s": max(own),
                "ratio": middle,
                "ratio_quartiles": [low, high],
                "runs_tok_s": own,
            }
        )
    table = Table("", "tok/s", "fastest", "ratio", "quartiles")
    for row in rows:
        low, high = row["ratio_quartiles"]
        table.add_row(
            row["label"],
            f"{row['decode_eager_tok_s']:.1f}",
            f"{row['fastest_tok_s']:.1f}",
            f"{row['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    Console().print(table)
    if options.json:
        protocol = {"rounds": options.rounds, "tokens": options.tokens, "prompt": PROMPT}
        write_result(options.json, rows, hardware_name(device), protocol)


if __name__ == "__main__":
    main()

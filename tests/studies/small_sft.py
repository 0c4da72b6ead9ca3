"""Rows of instructions, tasks without documents, and what a fine-tuning of finalists has left."""

import json
import random
from typing import ClassVar

from tiny import VOCAB

from midus.studies.sft_rows import read_rows

LORA = {"control": "lora", "upscale": {"memory": {"num_subkeys": 8}}}
SEEDS = [100, 200]


def write_rows(path, seed=0, count=60):
    rng = random.Random(seed)
    pairs = [(rng.randrange(4, VOCAB), rng.randrange(4, VOCAB)) for _ in range(count)]
    rows = [{"prompt": f"w{a} w{b} w5", "completion": f" w{b} w{a}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(folder, name="words"):
    return list(read_rows(folder, name).values())


class FakeTasks:
    """Two tasks whose scores are made of the model's own weights."""

    identity = "fake"
    ran: ClassVar[list[str]] = []

    def __init__(self, *_):
        pass

    def measure(self, model, options, results, say, is_past):
        for name in ("one", "two"):
            if name in results:
                continue
            if is_past():
                return False
            self.ran.append(name)
            results[name] = model.model.norm.weight.mean().item()
        return True

    def without_memory(self, results):
        return []

    def scores(self, results):
        tasks = {name: {"acc": value, "stderr": None, "n": 3} for name, value in results.items()}
        return {"tasks": tasks, "tasks_mean": results["one"], "tasks_of": self.identity}

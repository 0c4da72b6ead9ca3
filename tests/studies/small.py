"""A tiny base, tokens with three splits, and studies over them."""

import json

from tiny import save_base

from midus.data.build import build_tokens
from midus.data.options import SourceOptions
from midus.reports import write_json
from midus.studies.grid import final_trials, search_trials
from midus.studies.options import StudyOptions
from midus.studies.report import make_report
from midus.studies.results import add_result
from midus.studies.trial import trial_facts
from midus.studies.trials import hash_facts

# Of this machine and moment.
CHANGING = ("tokens_per_second", "seconds", "conditions")


def make_material(folder):
    """Base and tokens of 16-token sequences: enough for dozens of steps."""
    # The words of a text follow each other in order, so there is something to learn.
    base, text = folder / "base", folder / "text.jsonl"
    save_base(base)
    rows = [" ".join(f"w{4 + (7 * i + j) % 95}" for j in range(12 + i % 9)) for i in range(400)]
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    tokens = build_tokens(
        [SourceOptions(path=str(text))], base, folder / "tokens", held_out=0.15, test=0.15
    )
    (folder / "other.txt").write_text(" ".join(f"w{4 + i % 50}" for i in range(200)))
    return {"base": str(base), "tokens": str(tokens.path), "text": str(folder / "other.txt")}


HML = {"upscale": {"method": "midus", "memory": {"num_subkeys": 8}}}


def make_study(material, **overrides):
    """Two methods, two rates, eight steps."""
    values = {
        "name": "small",
        "run": {
            "model": material["base"],
            "data": {"sources": material["tokens"], "seq_len": 16, "max_tokens": 8 * 4 * 16},
            "batch_size": 4,
            "precision": "float32",
            "optimizer": {"recipe": "short"},
            "trainer": {"per_device_train_batch_size": 2},
            **overrides.pop("run", {}),
        },
        "methods": {"full": {}, "hml": {"set": HML}},
        "search": {"optimizer.lr": [1e-3, 1e-2]},
        "curve_points": 3,
        **overrides,
    }
    return StudyOptions.from_dict(values)


def rows_of(out):
    """Every line of a study's results, without what changes from run to run."""
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in CHANGING} for row in lines]


class Ticks:
    """A clock that moves on by one whenever it is asked."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


MADE_UP = {"made": "up"}


def fake_row(study, trial, figure, **extra):
    """A row with (validation loss, test loss), None for a trial that failed."""
    identity = hash_facts(MADE_UP)
    ended = {"status": "diverged"}
    if figure is not None:
        ended = {"status": "done", "trainable": 2_000_000, "texts": {}, "curve": [], "steps": 8}
        for name, loss in zip(("validation", "test"), figure, strict=True):
            perplexity = None if loss is None else 10 * loss
            ended[name] = {"loss": loss, "perplexity": perplexity}
    return {
        **trial_facts(study, trial, trial.key(identity)),
        "identity": identity,
        "hardware": "none",
        "conditions": {"commit": "none"},
        **ended,
        **extra,
    }


def report_of(out, material, figures, finals=(), extra=None, **overrides):
    """The report of a study with such figures.

    Args:
        out: Its folder.
        material: As `make_material` gives it.
        figures: Of the search's trials, in their order.
        finals: (method, rate, figures in the order of the final seeds, "left" for one to run).
        extra: What else every row says.
        overrides: As `make_study` takes them.
    """
    study = make_study(material, **overrides)
    write_json(out / "study.json", {"study": study.to_dict(), "material": MADE_UP})
    done = list(zip(search_trials(study), figures, strict=True))
    for method, lr, own in finals:
        trials = final_trials(study, method, {"optimizer.lr": lr})
        done += [pair for pair in zip(trials, own, strict=True) if pair[1] != "left"]
    for trial, figure in done:
        add_result(out, fake_row(study, trial, figure, **(extra or {})))
    return make_report(out)

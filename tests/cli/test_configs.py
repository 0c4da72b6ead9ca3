"""Every YAML file under configs/ and every `midus train` line that names one.

Lines are found in docs/reproduce.md and in the files' own headers. Each is read with its settings
and described on the meta device; a fine-tuning line starts from the run another line makes.
"""

import functools
import importlib.util
import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from midus.models.shapes import shape_config
from midus.studies.grid import search_trials
from midus.studies.options import read_study
from midus.training.dry_run import describe_run
from midus.training.options import TrainOptions, read_options
from midus.training.starting import planned_config
from midus.upscaling.inspect import describe

ROOT = Path(__file__).parents[2]
REPRODUCE = ROOT / "docs" / "reproduce.md"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
NAMES = [str(path.relative_to(ROOT)) for path in CONFIGS]
SHAPES = {
    "meta-llama/Llama-3.2-1B": "llama-3.2-1b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "smollm2-135m": "smollm2-135m",
}
# Models that a script of examples/ writes.
MADE = {"runs/tiny", "runs/ten_blocks", "runs/stories15M", "runs/demo/grown"}

# Trainable parameters of the paper's runs, inserted blocks or everything.
TRAINABLE = {
    "llama-3.2-1b": {
        "base": 1_235_814_400,
        "solar": 1_722_386_432,
        **dict.fromkeys(("llama_pro", "lesa", "opt_deus", "avg_deus"), 486_572_032),
        "hml": 54_542_336,
        "linear": 251_674_624,
        "pkm": 185_614_336,
        "ultramem": 171_984_896,
    },
    "llama-3.1-8b": {
        "base": 8_030_261_248,
        "solar": 11_520_053_248,
        **dict.fromkeys(("llama_pro", "lesa", "opt_deus", "avg_deus"), 3_489_792_000),
        "hml": 423_690_240,
        "linear": 1_476_460_544,
        "pkm": 1_212_219_392,
        "ultramem": 1_291_915_264,
    },
}


@dataclass(frozen=True)
class Line:
    """One `midus train` command."""

    path: str
    settings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return shlex.join([self.path, *self.settings])

    def options(self) -> TrainOptions:
        options = read_options(ROOT / self.path, self.settings)
        return replace(options, optimizer=options.optimizer.resolved(options.stage))


def lines_in(text: str) -> list[Line]:
    found = []
    for command in re.findall(r"\bmidus train ([^`\n]+)", text.replace("\\\n", " ")):
        path, *rest = shlex.split(command, comments=True)
        assert rest[::2] == ["--set"] * (len(rest) // 2), command
        found.append(Line(path, tuple(rest[1::2])))
    return found


def header(path: Path) -> str:
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#") for line in lines[:end])


def all_lines() -> list[Line]:
    texts = [REPRODUCE.read_text(), *map(header, CONFIGS)]
    plain = [Line(name) for name in NAMES]
    return list(dict.fromkeys([*plain, *(line for text in texts for line in lines_in(text))]))


LINES = all_lines()
every_config = pytest.mark.parametrize("path", CONFIGS, ids=NAMES)


@functools.cache
def runs() -> dict[str, Line]:
    """The line that makes each run's model; where several would, the first."""
    made: dict[str, Line] = {}
    for line in LINES:
        made.setdefault(f"{line.options().output}/model", line)
    return made


@functools.cache
def base_config(model: str):
    if model in SHAPES:
        return shape_config(SHAPES[model])
    return planned(runs()[model])


@functools.cache
def planned(line: Line):
    options = line.options()
    return planned_config(options, base_config(options.model))


def shape_of(line: Line) -> str:
    model = line.options().model
    return SHAPES[model] if model in SHAPES else shape_of(runs()[model])


@functools.cache
def described(key: str):
    """What the runs that differ in nothing that is counted have in common."""
    values = json.loads(key)
    return describe_run(TrainOptions.from_dict(values), base_config(values["model"]))


def describe_line(line: Line):
    values = {**line.options().to_dict(), "output": "runs/any"}
    return described(json.dumps(values, sort_keys=True))


@every_config
def test_a_config_begins_with_its_own_command(path):
    name = str(path.relative_to(ROOT))
    assert name in [line.path for line in lines_in(header(path))]


@every_config
def test_a_config_leaves_out_what_is_the_default(path):
    def flat(values, prefix=""):
        for key, value in values.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    values = yaml.safe_load(path.read_text())
    least = {key: values[key] for key in ("stage", "model", "output", "data")}
    least["data"] = {"sources": values["data"]["sources"]}
    if "upscale" in values:
        least["upscale"] = {}
    if "recipe" in values:
        least["recipe"] = values["recipe"]
    defaults = dict(flat(TrainOptions.from_dict(least).to_dict()))
    for key, value in flat(values):
        kept = key in ("stage", "model", "output", "recipe", "data.sources", "upscale.method")
        # The trainer's own, and parts that train apart, of which there are none by default.
        kept = kept or key.startswith(("trainer.", "optimizer.parts."))
        assert kept or defaults[key] != value, f"{key}: {value}"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.text)
def test_a_line_is_a_run(line):
    """Options parse, the model can be built, and the trainer takes the arguments."""
    options = line.options()
    if options.model in MADE:
        return
    plan = describe_line(line)
    shape = shape_of(line)
    if options.stage == "sft":
        assert plan["trainable"] == plan["parameters"]
    elif shape in TRAINABLE:
        assert plan["trainable"] == expected_trainable(shape, options.upscale)
    elif options.control == "none":
        assert plan["trainable"] == describe(planned(line))["params"]["trainable"]


def expected_trainable(shape: str, upscale) -> int:
    counts = TRAINABLE[shape]
    if upscale.method != "midus":
        return counts[upscale.method]
    if upscale.memory.kind != "hml":
        return counts[upscale.memory.kind]
    memory, base = upscale.memory, shape_config(shape)
    d, heads, head_dim = base.hidden_size, base.num_attention_heads, base.head_dim
    n, norms = memory.num_subkeys, {"none": 0, "batch": 2 * d, "layer": 2 * head_dim}
    a_block = norms[memory.query_norm] + (d * d if memory.attn_output_proj else 0)
    a_block += heads * head_dim * (n - 64) + (n * n - 64 * 64) * head_dim  # keys, latent values
    return counts["hml"] + base.num_hidden_layers // 2 * a_block


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.text)
def test_a_run_has_a_folder_of_its_own(line):
    """Two lines write to one folder only if they are one run with other arithmetic."""

    def of_the_run(options):
        values = options.to_dict()
        for key in ("precision", "attention", "sharding"):
            del values[key]
        del values["data"]["sources"]  # a user's own text in place of the file's
        return values

    options = line.options()
    first = runs()[f"{options.output}/model"]
    assert of_the_run(options) == of_the_run(first.options())


def test_a_setting_that_is_not_an_option_is_an_error():
    from midus.errors import MidusError

    with pytest.raises(MidusError, match=r"unknown option upscale\.policy"):
        Line(NAMES[0], ("upscale.policy=solar",)).options()


@pytest.mark.parametrize(
    ("name", "steps", "tokens", "rate"),
    [
        ("llama-3.2-1b/fineweb_edu", 12_100, 1_585_971_200, 1e-4),
        ("llama-3.1-8b/fineweb_edu", 12_100, 1_585_971_200, 5e-5),
        ("llama-3.2-1b/mathpile", 1_100_000_000 // (64 * 2048), 1_099_956_224, 1e-4),
        ("llama-3.1-8b/mathpile", 1_100_000_000 // (64 * 2048), 1_099_956_224, 1e-4),
    ],
)
def test_the_papers_recipe_of_continual_pretraining(name, steps, tokens, rate):
    line = Line(f"configs/{name}.yaml")
    options, plan = line.options(), describe_line(line)
    assert plan["max_steps"] == steps
    assert plan["max_steps"] * plan["tokens_a_step"] == tokens
    assert options.optimizer.warmup_ratio == 0.1
    assert [(g["name"], g["lr"], g["rate"], g["weight_decay"]) for g in plan["groups"]] == [
        ("decay", rate, "cosine", 1e-6),
        ("no_decay", rate, "cosine", 0.0),
        ("memory", rate, "constant", 0.0),
    ]


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("llama-3.2-1b/sft_alpaca_gpt4", 1e-5),
        ("llama-3.2-1b/sft_dolly", 1e-5),
        ("llama-3.1-8b/sft_alpaca_gpt4", 5e-6),
        ("llama-3.1-8b/sft_dolly", 5e-6),
    ],
)
def test_the_papers_recipe_of_finetuning(name, rate):
    line = Line(f"configs/{name}.yaml")
    plan = describe_line(line)
    assert {group["lr"] for group in plan["groups"]} == {rate}
    assert plan["length"].startswith("1 epoch;")
    assert (plan["batch_size"], line.options().data.held_out) == (64, 0)


def test_every_row_of_the_papers_training_tables_has_a_line():
    """Settings other than the output, by file; MIDUS-HML is the file itself."""
    have = {
        (line.path, tuple(s for s in line.settings if not s.startswith("output=")))
        for line in lines_in(REPRODUCE.read_text())
    }
    methods = ("base", "solar", "llama_pro", "lesa", "opt_deus", "avg_deus")
    want = set()
    for shape in ("llama-3.2-1b", "llama-3.1-8b"):
        folder = f"configs/{shape}"
        want |= {(f"{folder}/{f}.yaml", ()) for f in ("fineweb_edu", "mathpile", "sft_alpaca_gpt4")}
        want |= {(f"{folder}/fineweb_edu.yaml", (f"upscale.method={m}",)) for m in methods}
        for method in ("base", "llama_pro", "opt_deus"):
            want.add((f"{folder}/mathpile.yaml", (f"upscale.method={method}",)))
        for method in methods:
            model = f"model=runs/{shape}/fineweb_edu/{method}/model"
            want.add((f"{folder}/sft_alpaca_gpt4.yaml", (model,)))
            if shape == "llama-3.2-1b":
                want.add((f"{folder}/sft_dolly.yaml", (model,)))
    want.add(("configs/llama-3.2-1b/sft_dolly.yaml", ()))
    want.add(("configs/llama-3.1-8b/speed.yaml", ()))
    for setting in (
        *(f"upscale.method={m}" for m in ("base", "llama_pro", "opt_deus")),
        *(f"upscale.memory.kind={k}" for k in ("linear", "pkm", "ultramem")),
    ):
        want.add(("configs/llama-3.1-8b/speed.yaml", (setting,)))
    for setting in (
        *(f"upscale.memory.kind={k}" for k in ("linear", "pkm", "ultramem")),
        *(f"upscale.memory.num_subkeys={n}" for n in (16, 32)),
        *(f"upscale.memory.top_k={k}" for k in (1, 2, 8)),
        *(f"optimizer.weight_decay={w}" for w in ("0", "1e-2")),
        *(f"optimizer.lr={r}" for r in ("1e-5", "5e-5")),
        *(f"upscale.memory.query_norm={norm}" for norm in ("batch", "layer")),
        "upscale.memory.attention_residual=true",
        "upscale.memory.attn_output_proj=true",
        *(f"upscale.placement={p}" for p in ("top_heavy", "bottom_heavy")),
    ):
        want.add(("configs/llama-3.2-1b/fineweb_edu.yaml", (setting,)))
    assert want <= have, sorted(want - have)


def test_mathpiles_stackexchange_rows_get_a_text(tmp_path, monkeypatch):
    """The script of docs/reproduce.md, on rows of that form."""
    import gzip

    (script,) = re.findall(r"```python\n(.*?)```", REPRODUCE.read_text(), flags=re.DOTALL)
    folder = tmp_path / "data/MathPile/train/stackexchange"
    folder.mkdir(parents=True)
    post = {
        "question": {"Title": "Why?", "Body": "Ask."},
        "answers": [{"Body": "A"}, {"Body": "B"}],
    }
    with gzip.open(folder / "math.jsonl.gz", "wt") as file:
        file.write(json.dumps(post) + "\n")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # a second time changes nothing
        exec(script, {})
        with gzip.open(folder / "math.jsonl.gz", "rt") as file:
            assert [json.loads(line) for line in file] == [{"text": "Why?\n\nAsk.\n\nA\n\nB"}]


def test_smoke_runs(midus, tmp_path, monkeypatch):
    """Both commands of its header; a random model learns something of the text."""
    path = ROOT / "examples" / "make_tiny_model.py"
    spec = importlib.util.spec_from_file_location("make_tiny_model", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    for folder in ("src", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    script.make_tiny_model(Path("runs/tiny"))
    result = midus("train", "configs/smoke.yaml")
    assert result.code == 0, result.err
    before, after = map(float, re.search(r"perplexity (\S+) -> (\S+)", result.out).groups())
    assert before > 230  # of 257 tokens
    assert after < 0.9 * before
    assert (tmp_path / "runs/smoke/model/config.json").is_file()


def test_the_run_by_the_recipe_is_the_one_that_was_measured():
    run = read_options(ROOT / "configs" / "smollm2-135m" / "math_short.yaml")
    grid = read_study(ROOT / "studies" / "equal_parameters.yaml")
    (trial,) = [trial for trial in search_trials(grid) if trial.method == "dense"]
    for name in ("upscale", "key_start", "batch_size"):
        assert getattr(run, name) == getattr(trial.options, name), name
    # Studies resolve the rates that a file leaves to its recipe.
    assert run.optimizer.resolved("cpt") == trial.options.optimizer
    assert run.trainer["max_steps"] == trial.options.trainer["max_steps"]

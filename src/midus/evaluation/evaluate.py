"""Several models on a suite: what `midus eval` does."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from midus.errors import MidusError, suggest
from midus.evaluation.harness import (
    HarnessTask,
    TaskResult,
    any_column,
    load_tasks,
    pool,
    require_harness,
    run_task,
)
from midus.evaluation.language_model import Encoded, make_lm
from midus.evaluation.local import MissingFile, local_column
from midus.evaluation.scoring import tokenizer_digest
from midus.evaluation.store import Settings, Store
from midus.evaluation.suites import SUITES, Column, Suite, find_suite
from midus.models.configuration import read_config
from midus.models.fitting import refuse_too_long
from midus.models.identity import model_id
from midus.models.loading import load_model, load_tokenizer
from midus.models.record import is_delta
from midus.models.sources import resolve_source
from midus.models.weights import Weights

Say = Callable[[str], None]
_CPU_BATCH = 8


@dataclass
class Selection:
    """What is to be measured: the columns that can be, and those that cannot."""

    suite: Suite
    columns: list[Column]
    tasks: dict[str, list[HarnessTask]]
    """By column."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a column of the suite is not measured."""


@dataclass
class ModelScores:
    """One model's numbers."""

    model: str
    model_id: str
    dtype: str
    scores: dict[str, dict[str, float | int | None]]
    """By column: value, stderr, num_docs."""


def select(
    suite: str | None, names: list[str], data_dir: Path | None, shots: int | None = None
) -> Selection:
    """Finds the tasks of a suite, of some of its columns, or of any names the harness knows.

    Args:
        suite: The suite; None takes the names as tasks of the harness.
        names: The columns wanted; none: all of the suite's.
        data_dir: Folder of local files; None reads the hub.
        shots: For tasks that are named outside a suite; default: the harness's own number.
    """
    require_harness()
    if data_dir and not data_dir.is_dir():
        raise MidusError(f"data_dir={str(data_dir)!r} is no folder; give one with the files")
    if suite is None and not names:
        raise MidusError("nothing to measure; give --suite, --tasks or both")
    if suite is not None and shots is not None:
        raise MidusError(f"shots={shots} was given with --suite, which has its own; leave one out")
    names = list(dict.fromkeys(names))
    chosen = find_suite(suite) if suite else _adhoc(names, shots)
    known = {c.key: {c.key, c.pattern, local_column(c).key} for c in chosen.columns}
    for name in names:
        if not any(name in own for own in known.values()):
            raise MidusError(
                f"task {name!r} is not in the suite {chosen.name}; "
                f"{suggest(name, sorted(set().union(*known.values())))}"
            )
    selection = Selection(chosen, [], {})
    for column in chosen.columns:
        if names and not known[column.key].intersection(names):
            continue
        measured = local_column(column) if data_dir else column
        try:
            selection.tasks[measured.key] = load_tasks(measured, data_dir)
            selection.columns.append(measured)
        except MissingFile as error:
            if names:
                raise
            selection.missing[column.key] = str(error)
    if not selection.columns:
        raise MidusError(next(iter(selection.missing.values())))
    return selection


def evaluate_models(
    models: list[str],
    selection: Selection,
    *,
    limit: int | None = None,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    batch_size: str = "auto",
    max_length: int | None = None,
    store: Store | None = None,
    hardware: str = "",
    say: Say = lambda _: None,
) -> list[ModelScores]:
    """Each model's numbers, from the store where they are there already.

    Args:
        models: Folders, hub ids, ``.gguf`` files or ``smollm2-135m``.
        selection: What to measure.
        limit: Documents of each task; None: all.
        base: For deltas: where their base is, if not where they say.
        dtype: Type to load in; default: the checkpoint's.
        device: Where to run; default: the GPU if there is one.
        batch_size: The harness's own argument; ``auto`` is 8 on a CPU.
        max_length: Tokens a forward pass may see; default: the model's own limit.
        store: Where finished tasks are kept.
        hardware: The machine's name, for the record.
        say: Told what begins.
    """
    store = store or Store()
    run = Run(limit, base, dtype, device, batch_size, max_length, store, hardware, say)
    return [_evaluate_one(model, selection, run) for model in models]


@dataclass
class Run:
    """How all models of one call are run."""

    limit: int | None
    base: str | None
    dtype: torch.dtype | None
    device: str | None
    batch_size: str
    max_length: int | None
    store: Store
    hardware: str
    say: Say
    encoded: dict[str, Encoded] = field(default_factory=dict)
    """By tokenizer: what texts are in its tokens."""


def _evaluate_one(model: str, selection: Selection, run: Run) -> ModelScores:
    folder = resolve_source(model)
    identity = model_id(folder)
    settings = run_settings(folder, run.dtype, run.max_length)
    lm: Any = None
    done: dict[str, dict[str, float | int | None]] = {}
    ran: dict[tuple[str, int], TaskResult] = {}
    for column in selection.columns:
        kept = Settings(**settings, shots=column.shots, limit=run.limit)
        results = []
        for task in selection.tasks[column.key]:
            result = ran.get((task.name, column.shots))
            result = result or run.store.find(identity, task, kept)
            if result is None:
                lm = lm or _make_lm(model, folder, run, settings["max_length"])
                run.say(f"{task.name} on {model}")
                result = run_task(lm, task, run.limit)
                run.store.keep(model, identity, task, kept, result, run.hardware)
            ran[task.name, column.shots] = result
            results.append(result)
        done[column.key] = pool(column, results)
    return ModelScores(model, identity, settings["dtype"], done)


def run_settings(folder: Path, dtype: torch.dtype | None, max_length: int | None) -> dict[str, Any]:
    """What of a run's settings changes its numbers."""
    config = read_config(folder)
    refuse_too_long(max_length, config, "max_length")
    own = dtype or config.dtype or _stored_dtype(folder)
    length = max_length or config.max_position_embeddings
    return {"dtype": str(own).removeprefix("torch."), "max_length": length}


def _stored_dtype(folder: Path) -> torch.dtype:
    """What "auto" loads a checkpoint in whose config does not say."""
    for path in sorted(folder.glob("*.safetensors")):
        for entry in Weights.open_file(path).values():
            if entry.dtype.is_floating_point:
                return entry.dtype
    return torch.float32


def usable_tokenizer(source: str | Path) -> Any:
    """A model's tokenizer with a padding token, which batches need and scores do not depend on."""
    tokenizer = load_tokenizer(source)
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        raise MidusError(
            f"the tokenizer of {source} has neither a beginning nor an end token, one of which "
            "stands before a text that has nothing before it; set eos_token in its files"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
    return tokenizer


def _make_lm(model: str, folder: Path, run: Run, max_length: int) -> Any:
    delta = is_delta(read_config(folder))
    loaded = load_model(model, base=run.base if delta else None, dtype=run.dtype, device=run.device)
    batch_size = run.batch_size
    if batch_size == "auto" and loaded.device.type == "cpu":
        batch_size = str(_CPU_BATCH)
    tokenizer = usable_tokenizer(folder)
    encoded = run.encoded.setdefault(tokenizer_digest(tokenizer), {})
    return make_lm(loaded, tokenizer, encoded, batch_size=batch_size, max_length=max_length)


def _adhoc(names: list[str], shots: int | None) -> Suite:
    """Tasks outside a suite: those that suites have as these have them, and any of the harness."""
    known: dict[str, Column] = {}
    for suite in SUITES.values():
        for column in suite.columns:
            known |= {local_column(column).key: column, column.key: column}
    columns = []
    for name in names:
        if name not in known:
            columns.append(any_column(name, shots))
        else:
            columns.append(known[name] if shots is None else replace(known[name], shots=shots))
    return Suite("tasks", "as named", tuple(columns))

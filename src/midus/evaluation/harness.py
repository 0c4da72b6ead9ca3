"""lm-evaluation-harness underneath: its tasks, its prompts, its metrics, one task at a time.

A column of a suite covers one task of the harness or several (MMLU's 57 subjects). Each of these
is run alone, so that a killed evaluation loses one subject and not a night; a column's number is
then pooled by the harness's own functions, weighted by documents.
"""

import importlib.util
import logging
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from midus.errors import MidusError, suggest
from midus.evaluation.local import apply_local, find_local
from midus.evaluation.suites import Column

# Metrics from 0 to 1, besides accuracies; others are shown as they are, and in no mean.
_SHARES = frozenset({"exact_match", "em", "f1", "mcc", "contains", "pass@1", "recall", "precision"})

SEED = 1234
_BOOTSTRAP = 1000


@dataclass
class HarnessTask:
    """A task of the harness, ready to run."""

    name: str
    task: Any
    version: str
    documents: str
    """The hub dataset's name, or the digest of the local files."""


@dataclass(frozen=True)
class TaskResult:
    """What one task came to."""

    name: str
    metrics: dict[str, float]
    """By ``metric,filter``, as the harness writes it, and ``metric_stderr,filter`` beside it."""
    num_docs: int


def require_harness() -> None:
    """Refuses where the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MidusError("this needs lm-evaluation-harness; run: pip install 'midus[eval]'")
    import datasets

    _compile_templates_once()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def harness_version() -> str:
    from importlib.metadata import version

    return version("lm_eval")


def load_tasks(column: Column, data_dir: Path | None) -> list[HarnessTask]:
    """The harness's tasks that a column covers, with their documents.

    Args:
        column: Which number is wanted.
        data_dir: Folder of local files; None reads the hub.
    """
    require_harness()
    known = _manager(column.folder).all_subtasks
    names = [name for name in known if fnmatchcase(name, column.pattern)]
    if not names:
        raise MidusError(
            f"task {column.pattern!r} is not in lm_eval {harness_version()}; "
            f"{suggest(column.pattern, known)}"
        )
    return [_load(name, column, data_dir) for name in names]


def any_column(name: str, shots: int | None) -> Column:
    """A column for any task of the harness, with the first metric it declares."""
    require_harness()
    everything = _manager(None)
    if name not in everything.all_subtasks:
        raise MidusError(
            f"task {name!r} is unknown to lm_eval {harness_version()}; "
            f"{suggest(name, everything.all_subtasks)}"
        )
    path = everything.task_index[name].yaml_path
    settings = _settings(name, path)
    metric = (settings.get("metric_list") or [{"metric": None}])[0]
    if not isinstance(metric["metric"], str):
        raise MidusError(
            f"task {name!r} declares no metric by name; run it with lm_eval's own command"
        )
    filters = settings.get("filter_list") or [{"name": "none"}]
    is_perplexity = "perplexity" in metric["metric"] or metric["metric"] == "bits_per_byte"
    return Column(
        name,
        name,
        metric["metric"],
        str(path.parent.relative_to(_tasks_folder())),
        filter=filters[0]["name"],
        shots=settings.get("num_fewshot") or 0 if shots is None else shots,
        percent=_is_share(metric["metric"]),
        higher_is_better=metric.get("higher_is_better", not is_perplexity),
    )


def _is_share(metric: str) -> bool:
    """Whether a metric of the harness is a share of all documents, from 0 to 1."""
    return metric in _SHARES or metric.startswith("acc") or metric.endswith(("_acc", "_accuracy"))


def run_task(lm: Any, task: HarnessTask, limit: int | None) -> TaskResult:
    """Runs a model, in the harness's sense, on one task.

    Args:
        lm: A language model of the harness.
        task: What to run it on.
        limit: Documents to score; None: all.
    """
    from lm_eval.evaluator import evaluate

    # The shots of a document depend on how many were drawn before it: begin anew for every model.
    task.task.set_fewshot_seed(seed=SEED)
    try:
        results = evaluate(
            lm=lm,
            task_dict={"tasks": {task.name: task.task}, "groups": {}},
            limit=limit,
            bootstrap_iters=_BOOTSTRAP,
            log_samples=False,
        )
    except AssertionError as error:
        # What the harness asserts of a run is that requests fit the model.
        reason = str(error).strip().split("\n")[0] or "a request does not fit the model"
        raise MidusError(
            f"task {task.name!r} cannot be run within max_length={lm.max_length} ({reason}); "
            "raise --max-length or take a model with more positions"
        ) from error
    except OverflowError as error:
        raise MidusError(
            f"task {task.name!r} gives a perplexity that is too large for a number; "
            "look whether the model has diverged"
        ) from error
    metrics = {
        key: float(value)
        for key, value in results["results"][task.name].items()
        if isinstance(value, int | float) and "," in key
    }
    return TaskResult(task.name, metrics, results["n-samples"][task.name]["effective"])


def pool(column: Column, results: list[TaskResult]) -> dict[str, float | int | None]:
    """A column's value, standard error and documents, from those of its tasks."""
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    values = [result.metrics[f"{column.metric},{column.filter}"] for result in results]
    errors = [result.metrics.get(f"{column.metric}_stderr,{column.filter}") for result in results]
    sizes = [result.num_docs for result in results]
    if len(results) == 1:
        return {"value": values[0], "stderr": errors[0], "num_docs": sizes[0]}
    known = all(error is not None for error in errors) and min(sizes) > 1
    return {
        "value": aggregate_subtask_metrics(values, sizes, weight_by_size=True),
        "stderr": pooled_sample_stderr(errors, sizes) if known else None,
        "num_docs": sum(sizes),
    }


def _load(name: str, column: Column, data_dir: Path | None) -> HarnessTask:
    from lm_eval.tasks._index import Entry, Kind  # no public door to one task's settings

    manager = _manager(column.folder)
    settings = _settings(name, manager.task_index[name].yaml_path)
    documents = "/".join(filter(None, map(settings.get, ("dataset_path", "dataset_name"))))
    advice = "check the connection, or give local files by --data-dir"
    if data_dir:
        local = find_local(name)
        if local is None:
            raise MidusError(
                f"task {name!r} has no local form, and data_dir={str(data_dir)!r} was given; "
                "leave --data-dir out to read the hub"
            )
        settings, documents = apply_local(settings, local, data_dir)
        advice = f"mend its files in {data_dir}"
    entry = Entry(name=name, kind=Kind.TASK, yaml_path=None, cfg=settings)
    try:
        task = manager._factory.build(entry, registry=manager.task_index)
    except MidusError:
        raise
    except Exception as error:
        # The hub's client, its datasets and the network have errors of their own.
        reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
        raise MidusError(f"task {name!r} cannot read {documents} ({reason}); {advice}") from error
    if column.shots > len(task.sampler.df):
        raise MidusError(
            f"task {name!r} has {len(task.sampler.df)} documents to take shots from, and "
            f"{column.shots} are wanted; give a larger file"
        )
    task.set_config(key="num_fewshot", value=column.shots)
    version = (settings.get("metadata") or {}).get("version")
    return HarnessTask(name, task, str(version), documents)


def _settings(name: str, path: Path) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        return dict(load_yaml(path, resolve_func=True))
    except (Exception, SystemExit) as error:
        # A task's own code is run, and wants packages and files of its own.
        reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
        raise MidusError(f"task {name!r} cannot be set up ({reason})") from error


@cache
def _compile_templates_once() -> None:
    """Spares the harness compiling a task's templates for every document, most of its own time."""
    from lm_eval.utils import env

    env.from_string = lru_cache(env.from_string)


def _tasks_folder() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


@cache
def _manager(folder: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    if folder is None:
        return TaskManager()  # reads some ten thousand files
    return TaskManager(include_defaults=False, include_path=[_tasks_folder() / folder])

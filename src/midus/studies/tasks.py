"""Benchmark tasks of a study's models: what `midus eval` measures, of the model in memory."""

import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midus.errors import MidusError
from midus.evaluation.evaluate import Selection, select, usable_tokenizer
from midus.evaluation.harness import HarnessTask, TaskResult, harness_version, pool, run_task
from midus.evaluation.language_model import Encoded, make_lm
from midus.evaluation.suites import Column
from midus.studies.options import TaskOptions
from midus.studies.results import Row
from midus.studies.scoring import computing, evaluating
from midus.studies.trials import hash_facts
from midus.training.options import TrainOptions

_NO_MEMORY = "memory does not hold a batch of one"
# What a row of `batch_size` stands for; few examples are longer, and whole texts much longer.
_TOKENS_A_ROW = 512


class Tasks:
    """The tasks of a study with their documents, read before anything is trained.

    Args:
        options: Which tasks, and how much of them.
        source: The base, whose tokenizer all models have.

    Raises:
        MidusError: Where the harness, a task, a file or the tokenizer is missing.
    """

    def __init__(self, options: TaskOptions, source: str) -> None:
        self._options = options
        with _same_chances(torch.device("cpu")):
            self._selection = _select(options)
            self._tokenizer = usable_tokenizer(source)
        self._encoded: Encoded = {}
        self.identity = hash_facts(_facts(self._selection, options.limit))
        """Stands for all that decides the scores, besides the model."""

    def measure(
        self,
        model: Any,
        options: TrainOptions,
        results: Row,
        say: Callable[[str], None] = lambda _: None,
        is_past: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Runs the tasks that have no result yet; False where time was up before the last.

        Args:
            model: On its device; it is in evaluation mode meanwhile.
            options: Of its run; precision counts.
            results: Of each task of the harness; grows.
            say: Is told what begins.
            is_past: Asked before each task whether time is up.
        """
        device = model.device
        with _same_chances(device), evaluating(model), computing(options, device):
            lm = self._make_lm(model)
            for column in self._selection.columns:
                left = {
                    key: task for key, task in self._tasks(column).items() if key not in results
                }
                if left:
                    say(f"  task {column.key}")
                for key, task in left.items():
                    if is_past():
                        return False
                    results[key] = self._run(lm, task)
        return True

    def without_memory(self, results: Row) -> list[str]:
        """What memory did not hold even one example of at a time."""
        return [key for key, result in results.items() if result.get("error") == _NO_MEMORY]

    def scores(self, results: Row) -> Row:
        """What a row says of them: each task's figure, their mean, and what they were."""
        tasks = {column.key: self._score(column, results) for column in self._selection.columns}
        values = [tasks[column.key][column.metric] for column in _averaged(self._selection)]
        is_whole = bool(values) and None not in values
        mean = sum(values) / len(values) if is_whole else None
        return {"tasks": tasks, "tasks_mean": mean, "tasks_of": self.identity}

    def _score(self, column: Column, results: Row) -> Row:
        found = [results[key] for key in self._tasks(column)]
        errors = [result["error"] for result in found if "error" in result]
        if errors:
            return {column.metric: None, "stderr": None, "n": 0, "error": errors[0]}
        pooled = pool(column, [TaskResult(**result) for result in found])
        return {column.metric: pooled["value"], "stderr": pooled["stderr"], "n": pooled["num_docs"]}

    def _tasks(self, column: Column) -> dict[str, HarnessTask]:
        """A column's tasks under names that tell shots apart; columns may share them."""
        tasks = self._selection.tasks[column.key]
        return {f"{task.name}, {column.shots} shots": task for task in tasks}

    def _run(self, lm: Any, task: HarnessTask) -> Row:
        """A result, or why there is none: a training must not be lost to a task."""
        try:
            # The harness draws bars of its own.
            with redirect_stderr(io.StringIO()):
                return asdict(run_task(lm, task, self._options.limit))
        except MidusError as error:
            return {"error": str(error)}
        except torch.OutOfMemoryError:
            if lm.batch_size_per_gpu == 1:
                return {"error": _NO_MEMORY}
        except Exception as error:  # whatever the harness or the device raises
            return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        # Behind the handler, whose error refers to what was in memory.
        torch.cuda.empty_cache()
        lm.batch_size_per_gpu //= 2
        return self._run(lm, task)

    def _make_lm(self, model: Any) -> Any:
        # The harness sets autocast anew when it generates, so it has to be told.
        kind = model.device.type
        is_mixed = torch.is_autocast_enabled(kind)
        return make_lm(
            model,
            self._tokenizer,
            self._encoded,
            batch_size=self._options.batch_size,
            max_length=model.config.max_position_embeddings,
            tokens_a_row=_TOKENS_A_ROW,
            mixed_precision_dtype=torch.get_autocast_dtype(kind) if is_mixed else None,
        )


def _select(options: TaskOptions) -> Selection:
    folder = Path(options.data).expanduser() if options.data else None
    try:
        selection = select(options.suite, options.names, folder)
    except MidusError as error:
        raise MidusError(f"tasks: {error}") from error
    if selection.missing:
        raise MidusError(
            f"tasks: {next(iter(selection.missing.values()))}; put it there, or name the tasks to "
            "measure under tasks.names"
        )
    return selection


def _facts(selection: Selection, limit: int | None) -> Row:
    columns = [
        {
            "column": column.key,
            "metric": f"{column.metric},{column.filter}",
            "shots": column.shots,
            "tasks": [[t.name, t.version, t.documents] for t in selection.tasks[column.key]],
        }
        for column in selection.columns
    ]
    return {"columns": columns, "limit": limit, "lm_eval": harness_version()}


def _averaged(selection: Selection) -> list[Column]:
    """Columns of the suite's own mean; without one, all that are shares."""
    average = selection.suite.average
    return [
        column
        for column in selection.columns
        if column.percent and (average is None or (column.variant_of or column.key) in average.over)
    ]


@contextmanager
def _same_chances(device: torch.device) -> Iterator[None]:
    """Leaves all random states as they were: the next trial must not depend on tasks."""
    plain = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002  # the one that others draw from
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(of_numpy)  # noqa: NPY002

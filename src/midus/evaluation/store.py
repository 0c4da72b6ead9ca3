"""Finished tasks on disk: one file a model and task, under everything that could change its number.

A killed evaluation goes on where it stopped, and two commands that ask for the same task of the
same model, byte for byte, share one run.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from midus.evaluation.harness import HarnessTask, TaskResult, harness_version
from midus.models.sources import cache_folder
from midus.reports import conditions, write_json


@dataclass(frozen=True)
class Settings:
    """How a model was run."""

    dtype: str
    max_length: int
    shots: int
    limit: int | None


class Store:
    """Results by model and task.

    Args:
        folder: Where they are; default: the cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "evaluations"

    def find(self, model_id: str, task: HarnessTask, settings: Settings) -> TaskResult | None:
        """The result that is there already, if it is whole."""
        try:
            found = json.loads(self._path(model_id, task, settings).read_text())
            return TaskResult(**found["result"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(
        self,
        model: str,
        model_id: str,
        task: HarnessTask,
        settings: Settings,
        result: TaskResult,
        hardware: str,
    ) -> None:
        """Writes a result with the conditions it was taken under."""
        entry = {
            "kind": "midus.eval.task",
            "model": model,
            "model_id": model_id,
            **_identity(task, settings),
            "result": asdict(result),
            "hardware": hardware,
            "conditions": conditions(),
        }
        write_json(self._path(model_id, task, settings), entry)

    def _path(self, model_id: str, task: HarnessTask, settings: Settings) -> Path:
        identity = json.dumps(_identity(task, settings), sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return self.folder / model_id / f"{task.name}-{digest}.json"


def _identity(task: HarnessTask, settings: Settings) -> dict[str, Any]:
    return {
        "task": task.name,
        "version": task.version,
        "documents": task.documents,
        "lm_eval": harness_version(),
        **asdict(settings),
    }

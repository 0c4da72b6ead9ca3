"""The harness's tasks over local files, for machines without the hub.

Each YAML in `tasks/` says which task of the harness it replaces, where its files are under the
data folder, and how their rows become the hub's documents. Everything else, prompt, choices,
filters and metric, stays the harness's own. A file that holds other documents than the hub's, or
lacks the split the shots come from, makes a task with a name of its own.
"""

import hashlib
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from midus.data.rows import open_file, read_rows
from midus.errors import MidusError
from midus.evaluation.local_rows import ROW_READERS, TEXT_READERS, Document
from midus.evaluation.suites import Column

_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
SHOTS = "shots"
"""The split made of the documents that are taken from scoring to be shots."""


@dataclass(frozen=True)
class LocalTask:
    """One YAML of `tasks/`."""

    replaces: str
    """The harness's task, or a pattern of tasks, it stands for."""
    splits: dict[str, dict[str, str]]
    """For each split: the file, what reads its rows, and the field that holds a part's name."""
    name: str | None = None
    """Its own name, where it is not quite the task it replaces."""
    shots_every: int = 0
    """Takes every so-manieth document from scoring, to be a shot."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the harness's task that differ."""


@cache
def local_tasks() -> tuple[LocalTask, ...]:
    """Every task that local files are known for."""
    folder = files("midus").joinpath("evaluation", "tasks")
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
    return tuple(LocalTask(**yaml.safe_load(path.read_text())) for path in paths)


def find_local(name: str) -> LocalTask | None:
    """The local task that stands for a task of the harness."""
    return next((task for task in local_tasks() if fnmatch(name, task.replaces)), None)


def local_column(column: Column) -> Column:
    """A column as local files have it: under a name of its own where they are not quite it."""
    local = find_local(column.pattern)
    if local is None or local.name is None:
        return column
    # One subject of MATH is not all of it.
    name = local.name if column.pattern == local.replaces else f"{column.key} ({local.name})"
    return replace(
        column,
        key=name,
        label=name,
        tasks=column.pattern,
        variant_of=column.key,
    )


def _find_files(task: LocalTask, data_dir: Path, settings: dict[str, Any]) -> dict[str, Path]:
    """Where each split's file is; the first that is missing is named."""
    found = {}
    for split, entry in task.splits.items():
        wanted = [
            data_dir / entry[key].format(dataset_name=settings.get("dataset_name"))
            for key in ("file", "or")
            if key in entry
        ]
        unpacked = [path.with_suffix("") for path in wanted if path.suffix == ".xz"]
        path = next((p for p in (*wanted, *unpacked) if p.is_file()), None)
        if path is None:
            raise MissingFile(
                f"task {task.name or settings['task']!r} reads {wanted[0]}, which is missing"
            )
        found[split] = path
    return found


class MissingFile(MidusError):
    """A task's local file is not there."""


def apply_local(
    settings: dict[str, Any], task: LocalTask, data_dir: Path
) -> tuple[dict[str, Any], str]:
    """The harness's settings with local documents, and a digest of what was read.

    Args:
        settings: The harness's own settings of a task.
        task: The local task.
        data_dir: Folder that holds the files.
    """
    part = settings.get("dataset_name")
    paths = _find_files(task, data_dir, settings)
    name = task.name or settings["task"]
    documents = {
        split: _read(path, task.splits[split], part, name) for split, path in paths.items()
    }
    changed = {**settings, **task.settings}
    if task.shots_every:
        (split,) = documents
        held_out = documents[split][:: task.shots_every]
        documents[split] = [doc for i, doc in enumerate(documents[split]) if i % task.shots_every]
        documents[SHOTS] = held_out
        changed["training_split"] = SHOTS
    for name in _SPLITS:
        if changed.get(name) not in documents:
            changed[name] = None
    changed["custom_dataset"] = lambda **_: _as_datasets(documents)
    return changed, _digest(task, paths)


def _read(path: Path, entry: dict[str, str], part: str | None, task: str) -> list[Document]:
    reader = entry.get("rows", "as_it_is")
    if reader in TEXT_READERS:
        documents = _read_text(path, reader, task)
    else:
        try:
            documents = _read_rows(path, reader, path.stat().st_mtime_ns)
        except _NoRow as error:
            raise MidusError(
                f"line {error.number} of {path} is no row of task {task!r} ({error.problem}); "
                "fetch the file again"
            ) from error
    if where := entry.get("where"):
        documents = [doc for doc in documents if doc[where] == part]
    if not documents:
        rows = f"rows whose {where} is {part!r}" if where else "documents"
        raise MidusError(f"task {task!r} finds no {rows} in {path}; fetch the file again")
    return documents


def _read_text(path: Path, reader: str, task: str) -> list[Document]:
    try:
        with open_file(path) as file:
            return list(TEXT_READERS[reader](file.read().decode("utf-8")))
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise MidusError(
            f"{path} is no file of task {task!r} ({error}); fetch the file again"
        ) from error


class _NoRow(ValueError):
    """A line that a reader cannot use."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(problem)
        self.number, self.problem = number, problem


@cache
def _read_rows(path: Path, reader: str, _written: int) -> list[Document]:
    """A file's documents, read once for all of MMLU's subjects, and again when it has changed."""
    documents: list[Document] = []
    for row in read_rows(path):
        problem = row.problem
        if problem is None:
            try:
                document = ROW_READERS[reader](row.value)
                first = documents[0] if documents else document
                lacking = [name for name in first if document.get(name) is None]
                lacking = [name for name in lacking if first[name] is not None]
                problem = f"it has no {lacking[0]!r}" if lacking else None
                documents.append(document)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                problem = f"{type(error).__name__}: {error}"
        if problem:
            raise _NoRow(row.number, problem)
    return documents


def _as_datasets(documents: dict[str, list[Document]]) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict({split: Dataset.from_list(docs) for split, docs in documents.items()})


def _digest(task: LocalTask, paths: dict[str, Path]) -> str:
    # How rows are read can change their number, too.
    readers = files("midus").joinpath("evaluation", "local_rows.py").read_bytes()
    digest = hashlib.sha256(repr(task).encode() + readers)
    for path in paths.values():
        digest.update(_file_digest(path, path.stat().st_mtime_ns))
    return digest.hexdigest()[:12]


@cache
def _file_digest(path: Path, _written: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()

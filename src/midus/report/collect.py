"""Finds what there is to report: runs, models and the results that belong to them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from midus.errors import MidusError
from midus.report.models import Model, local_id, read_model
from midus.report.results import KINDS, Result, find_results
from midus.report.runs import Run, is_run, model_folder, read_run

ANALYSIS_NAME = "analysis"
_NOTHING = "no run (metrics.jsonl), no model (config.json) and no result"


@dataclass
class Subject:
    """One run or model of the report, or a model known from its results alone."""

    target: str
    """As the user gave it, or as the results name it."""
    source: str | None
    """The model as `midus inspect` takes it; None for a run that has none."""
    run: Run | None = None
    model: Model | None = None
    known_id: str | None = None
    """The id its results give, where they are all that is known of it."""
    label: str = ""
    """Short, and different from the labels of the others."""
    results: list[Result] = field(default_factory=list)

    @cached_property
    def model_id(self) -> str | None:
        """Reads all of the weights, so it is asked for only where there are results to match."""
        return self.known_id or (local_id(self.source) if self.source else None)

    def owns(self, result: Result) -> bool:
        """Whether a result is about this model, alone or among others."""
        return self.source is not None and result.is_about(self.model_id, self.source)

    def of_kind(self, kind: str) -> list[Result]:
        return [result for result in self.results if result.kind == kind]

    def found(self) -> list[str]:
        """What there is, in words."""
        words = []
        if self.run:
            words.append(f"run ({len(self.run.metrics):,} lines of metrics)")
        if self.model:
            words.append(f"stack ({len(self.model.blocks)} blocks)")
        counts = {kind: len(self.of_kind(kind)) for kind in KINDS}
        return words + [f"{kind} ({num})" for kind, num in counts.items() if num]

    def missing(self) -> list[str]:
        """What there is not."""
        absent = [name for name in ("run", "model") if getattr(self, name) is None]
        return absent + [kind for kind in KINDS if not self.of_kind(kind)]


@dataclass(frozen=True)
class Collection:
    """Everything a report shows."""

    subjects: list[Subject]
    general: list[Result]
    """Results about no model: the theorem on random instances."""
    ignored: list[Result]
    """Results of other models."""


def collect(
    targets: Sequence[str], results: Iterable[Path] = (), here: Path | None = None
) -> Collection:
    """Reads the targets and finds their results.

    Args:
        targets: Run folders, model folders, hub ids, ``smollm2-135m``, result files or folders of
            them.
        results: More files and folders of results; only those of the targets are taken.
        here: Folder whose ``analysis/`` is searched too; default: the current one.
    """
    subjects: list[Subject] = []
    given: list[Result] = []
    nearby: list[Result] = []
    for target in dict.fromkeys(targets):
        found = _read_target(target)
        if isinstance(found, Subject):
            subjects.append(found)
            if (folder := Path(target).expanduser()).is_dir():
                nearby += find_results(folder)
        else:
            given += found
    nearby += find_results((here or Path()) / ANALYSIS_NAME)
    for place in results:
        nearby += _some(place, "no result")
    for result in given:
        if result.models and not any(subject.owns(result) for subject in subjects):
            (known_id, name), *_ = result.models
            subjects.append(Subject(name or known_id or "", name or "", known_id=known_id))
    general: list[Result] = []
    ignored: list[Result] = []
    for result in _once([*given, *nearby]):
        owners = [subject for subject in subjects if subject.owns(result)]
        for owner in owners:
            owner.results.append(result)
        if not owners:
            (ignored if result.models else general).append(result)
    for subject, label in zip(subjects, labels([s.target for s in subjects]), strict=True):
        subject.label = label
    return Collection(subjects, general, ignored)


def _read_target(target: str) -> Subject | list[Result]:
    path = Path(target).expanduser()
    if path.is_dir() and is_run(path):
        run, folder = read_run(path), model_folder(path)
        source = str(folder) if folder else None
        return Subject(target, source, run, read_model(source) if source else None)
    if path.is_dir() and (path / "config.json").is_file():
        return Subject(target, str(path), model=read_model(str(path)))
    is_a_path = target.startswith(("/", ".", "~")) or target.count("/") > 1  # and no hub id
    if path.is_dir() or path.suffix == ".json" or (is_a_path and not path.exists()):
        return _some(path)
    if path.is_file() and path.suffix != ".gguf":
        raise MidusError(f"{target} is no run, model or result; give a folder or a result's JSON")
    return Subject(target, target, model=read_model(target))


def _some(place: Path, nothing: str = _NOTHING) -> list[Result]:
    """The results of a place that was named, so that there must be some."""
    if not place.exists():
        raise MidusError(f"{place} does not exist; give a run, a model or a result's JSON")
    found = find_results(place)
    if not found:
        raise MidusError(
            f"{place} holds {nothing} ({', '.join(f'{kind}.json' for kind in KINDS)}); "
            "give a folder that does"
        )
    return found


def _once(results: list[Result]) -> list[Result]:
    """Each result once, however many ways lead to it and wherever it was copied."""
    kept: list[Result] = []
    for result in results:
        if all(result.values != other.values for other in kept):
            kept.append(result)
    return kept


def labels(targets: Sequence[str]) -> list[str]:
    """The shortest ends of paths that tell them apart; names that are no paths stay whole."""
    pieces = []
    for target in targets:
        path = Path(target).expanduser()
        pieces.append(path.resolve().parts if path.exists() else (target,))
    # `model` says nothing without the run it is in.
    lengths = [2 if parts[-1] == "model" else 1 for parts in pieces]
    for _ in range(max((len(parts) for parts in pieces), default=0)):
        ends = ["/".join(parts[-n:]) for parts, n in zip(pieces, lengths, strict=True)]
        for i, end in enumerate(ends):
            lengths[i] += ends.count(end) > 1
    return ["/".join(parts[-n:]) for parts, n in zip(pieces, lengths, strict=True)]

"""Which setting of a method counts, by mean validation loss, and which methods go on."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midus.studies.grid import final_trials, search_trials
from midus.studies.options import StudyOptions
from midus.studies.results import Row, is_done
from midus.studies.trials import Trial


@dataclass(frozen=True)
class Choice:
    """What a method's search came to."""

    method: str
    varied: dict[str, Any]
    setting: str
    validation_loss: float
    num_trials: int
    num_failed: int
    """Trials that diverged or ran out of memory."""
    at_edge: tuple[str, ...]
    """Searched options whose best value is the smallest or largest that was tried."""


def search_rows(
    study: StudyOptions, identity: str, rows: Mapping[str, Row], method: str
) -> list[tuple[Trial, Row | None]]:
    """The search's trials of a method with their rows, None for those still to run."""
    trials = [trial for trial in search_trials(study) if trial.method == method]
    return [(trial, rows.get(trial.key(identity))) for trial in trials]


def chosen_rows(
    study: StudyOptions, identity: str, rows: Mapping[str, Row], choice: Choice
) -> list[tuple[Trial, Row | None]]:
    """The chosen setting's trials of the search, with their rows."""
    found = search_rows(study, identity, rows, choice.method)
    return [(trial, row) for trial, row in found if trial.varied == choice.varied]


def final_rows(
    study: StudyOptions, identity: str, rows: Mapping[str, Row], choice: Choice
) -> list[tuple[Trial, Row | None]]:
    """The chosen setting with the final seeds, or the search's where there are none, and rows."""
    if not study.final_seeds:
        return chosen_rows(study, identity, rows, choice)
    trials = final_trials(study, choice.method, choice.varied)
    return [(trial, rows.get(trial.key(identity))) for trial in trials]


def goes_on(study: StudyOptions, identity: str, rows: Mapping[str, Row]) -> dict[str, bool | None]:
    """Whether each method goes on to the final seeds; None while searches that decide it are left.

    The best on validation do, by rows of the search alone, and those whose models are kept.
    """
    going: dict[str, bool | None] = {name: own.keep for name, own in study.methods.items()}
    if study.finalists is None:
        return dict.fromkeys(going, True)
    if any(row is None for name in going for _, row in search_rows(study, identity, rows, name)):
        return {name: is_kept or None for name, is_kept in going.items()}
    choices = [choose(study, identity, rows, name) for name in going]
    ranked = sorted(filter(None, choices), key=lambda choice: choice.validation_loss)
    return going | {choice.method: True for choice in ranked[: study.finalists]}


def choose(
    study: StudyOptions, identity: str, rows: Mapping[str, Row], method: str
) -> Choice | None:
    """The best setting of a method; None while trials are missing, or where all have failed."""
    found = search_rows(study, identity, rows, method)
    if any(row is None for _, row in found):
        return None
    losses: dict[str, list[float | None]] = {}
    settings: dict[str, Trial] = {}
    for trial, row in found:
        assert row is not None
        setting = json.dumps(trial.varied)
        settings.setdefault(setting, trial)
        loss = row["validation"]["loss"] if is_done(row) else None
        losses.setdefault(setting, []).append(loss)
    # A setting that failed with one seed is not chosen for its luck with another.
    means = {
        setting: statistics.mean(loss for loss in own if loss is not None)
        for setting, own in losses.items()
        if None not in own
    }
    if not means:
        return None
    best = min(means, key=means.__getitem__)
    varied = settings[best].varied
    return Choice(
        method=method,
        varied=varied,
        setting=settings[best].setting,
        validation_loss=means[best],
        num_trials=len(found),
        num_failed=sum(loss is None for own in losses.values() for loss in own),
        at_edge=tuple(_edges(varied, [trial.varied for trial in settings.values()])),
    )


def _edges(varied: dict[str, Any], tried: list[dict[str, Any]]) -> list[str]:
    """Options with three or more numbers tried, the best of which is the first or the last."""
    edges = []
    for name, value in varied.items():
        numbers = sorted({own[name] for own in tried if _is_number(own.get(name))})
        if _is_number(value) and len(numbers) > 2 and value in (numbers[0], numbers[-1]):
            edges.append(name)
    return edges


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

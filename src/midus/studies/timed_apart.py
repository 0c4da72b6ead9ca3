"""Speeds of trials that have none, as those that shared their device: steps alone, timed after."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from midus.errors import MidusError
from midus.reports import conditions
from midus.studies.folder import opened, read_study_folder
from midus.studies.grid import search_trials
from midus.studies.loop import Loop
from midus.studies.material import SLOW, Material
from midus.studies.results import Row, add_speed, is_done, read_results
from midus.studies.step_cost import step_cost
from midus.studies.timing import WARM_STEPS, Stopwatch
from midus.studies.trials import UNTOUCHED, hash_facts
from midus.studies.workers import UNSEEN, Worker
from midus.training.options import TrainOptions
from midus.training.run import hardware
from midus.upscaling.method import Track

Say = Callable[[str], None]
_NO_MEMORY = "memory does not hold it; free the device, or take another"
_NOT_ALONE = (
    "another study has come to the device; when it has ended, the same command times what is left"
)


@dataclass(frozen=True)
class Timed:
    """What came of a call."""

    trials: int
    """Trials that have a speed since."""
    timings: int
    """How often steps were timed for them."""
    skipped: list[str]
    """What could not be timed, and why."""


@dataclass(frozen=True)
class _Alike:
    """Trials whose steps cost the same; the first one's are timed."""

    cost: str
    """Stands for the base and what decides how long a step of it takes."""
    options: TrainOptions
    rows: list[Row]

    @property
    def said(self) -> str:
        first, others = self.rows[0], len(self.rows) - 1
        name = _said(first)
        return f"{name}, for {others:,} more whose steps cost the same" if others else name


def time_studies(
    folders: Sequence[Path],
    *,
    steps: int = 10,
    only: Sequence[str] = (),
    say: Say = lambda _: None,
    track: Track = lambda items, _: items,
) -> Timed:
    """`time_trials` of several studies; what they have in common is timed once.

    All must be studies before the first is timed, and what then keeps one from being timed is said
    with the results of the others.
    """
    for folder in folders:
        read_study_folder(folder)
    speeds: dict[str, Row] = {}
    trials, timings, skipped = 0, 0, []
    for folder in folders:
        try:
            timed = time_trials(folder, steps=steps, only=only, say=say, track=track, speeds=speeds)
        except MidusError as error:
            if len(folders) == 1:
                raise
            say(f"{folder}: {error}")
            skipped.append(f"{folder}: {error}")
            continue
        trials, timings = trials + timed.trials, timings + timed.timings
        skipped += timed.skipped
    return Timed(trials, timings, skipped)


def time_trials(
    folder: Path,
    *,
    steps: int = 10,
    only: Sequence[str] = (),
    say: Say = lambda _: None,
    track: Track = lambda items, _: items,
    speeds: dict[str, Row] | None = None,
) -> Timed:
    """Times steps for every trial of a study that is done and has no speed, and adds a line each.

    Args:
        folder: Of the study.
        steps: How many are timed, after those that warm up.
        only: Methods; default: all.
        say: Is told in a sentence what happens.
        track: Wraps loops in a progress bar.
        speeds: What was timed for other studies on this device, and holds for trials of this one;
            what is timed here is added.
    """
    if steps < 1:
        raise MidusError(f"steps={steps} must be a positive whole number")
    study, identity = read_study_folder(folder)
    rows = [row for row in read_results(folder).values() if row["method"] != UNTOUCHED]
    known = list(dict.fromkeys([*study.methods, *(row["method"] for row in rows)]))
    for name in only:
        if name not in known:
            raise MidusError(f"the study has no method {name!r}; choose from {', '.join(known)}")
    chosen = [row for row in rows if not only or row["method"] in only]
    untimed = _without_speed(chosen, identity, say)
    if not untimed:
        return Timed(0, 0, [])
    base = search_trials(study)[0].options
    material = Material(base.model, base.data.sources[0].path, study.texts)
    groups = _alike(untimed, material, say)
    with opened(folder, material) as worker:
        if not worker.sees_other_studies:
            say(UNSEEN)
        session = _Session(folder, material, worker, steps, say, track)
        return session.time(groups, {} if speeds is None else speeds)


def _without_speed(rows: list[Row], identity: str, say: Say) -> list[Row]:
    found = [row for row in rows if is_done(row) and row.get("tokens_per_second") is None]
    own = [row for row in found if row["identity"] == identity]
    if others := len(found) - len(own):
        say(f"{others:,} trials are of another base, other tokens or other texts, and are left out")
    return own


def _alike(rows: list[Row], material: Material, say: Say) -> list[_Alike]:
    base = hash_facts({name: material.facts[name] for name in ("base", "config")})
    groups: dict[str, _Alike] = {}
    for row in sorted(rows, key=_grows_slowly):
        try:
            options = TrainOptions.from_dict(row["options"])
        except (ValueError, TypeError) as error:
            say(f"{_said(row)}: left out, as its options are no more ({error})")
            continue
        cost = f"{base}-{step_cost(options, material.base.config)}"
        groups.setdefault(cost, _Alike(cost, options, [])).rows.append(row)
    return list(groups.values())


def _grows_slowly(row: Row) -> bool:
    """Whether another trial that costs the same should rather be timed."""
    return (row["options"].get("upscale") or {}).get("method") in SLOW


def _said(row: Row) -> str:
    return f"{row['method']}, {row['setting'] or 'as it is'}, seed {row['seed']}"


class _Session:
    """What the timings of one call have in common."""

    def __init__(
        self, folder: Path, material: Material, worker: Worker, steps: int, say: Say, track: Track
    ) -> None:
        self._folder, self._material, self._worker = folder, material, worker
        self._steps, self._say, self._track = steps, say, track
        self._told: set[str] = set()

    def time(self, groups: list[_Alike], speeds: dict[str, Row]) -> Timed:
        """Times each group once, if no other study has, and writes the speed of its rows."""
        trials, timings, skipped = 0, 0, []
        for number, group in enumerate(groups, start=1):
            self._say(f"{number} of {len(groups)}: {group.said}")
            speed, why = speeds.get(group.cost), "as timed for another study"
            if speed is None:
                speed, why = self._timed(group)
                timings += speed is not None
            if speed is None:
                self._say(f"  skipped: {why}")
                skipped.append(f"{group.said}: {why}")
                continue
            speeds[group.cost] = speed
            for row in group.rows:
                add_speed(self._folder, row, speed)
            trials += len(group.rows)
            self._say(f"  {speed['tokens_per_second']:,.0f} tokens/s{why and f', {why}'}")
        return Timed(trials, timings, skipped)

    def _timed(self, group: _Alike) -> tuple[Row | None, str]:
        """What rows of a group get, or why it could not be timed."""
        speed, why = None, ""
        try:
            speed = self._speed(group)
        except torch.OutOfMemoryError:
            why = _NO_MEMORY
        except MidusError as error:  # a missing package, say: the others can still be timed
            why = str(error)
        # Not before an exception is gone: it holds the model it came from.
        self._material.release()
        return speed, why

    def _speed(self, group: _Alike) -> Row:
        solitude = self._worker.solitude()
        if solitude is None:
            raise MidusError(_NOT_ALONE)
        rate, is_graphed = self._run_steps(group.options)
        if self._worker.solitude() != solitude:
            raise MidusError(_NOT_ALONE)
        apart = {
            "steps": self._steps,
            "trial": group.rows[0]["key"],
            "hardware": hardware(),
            "conditions": conditions(),
        }
        return {"tokens_per_second": rate, "graphed": is_graphed, "timed_apart": apart}

    def _run_steps(self, options: TrainOptions) -> tuple[float, bool]:
        """Tokens a second of a trial's first steps, and whether they were CUDA graphs."""
        num, a_step = WARM_STEPS + self._steps, options.batch_size * options.data.seq_len
        # As long as the trial, if it was longer: rates that rise sooner than in it may diverge.
        length = max(num, int(options.trainer["max_steps"]))
        options = replace(options, trainer={**options.trainer, "max_steps": length})
        model = self._material.start(options, self._track)
        sequences = self._material.sequences("train", options.data.seq_len, num * a_step)
        loop = Loop(model, options, sequences)
        watch = Stopwatch(self._material.device)
        for _ in range(num):
            loop.step()
            watch.count(a_step)
        watch.stop()
        self._tell_once(loop.why_not_graphed)
        rate = watch.rate()
        assert rate is not None
        return rate, loop.is_graphed

    def _tell_once(self, reason: str) -> None:
        if reason and reason not in self._told:
            self._told.add(reason)
            self._say(f"  steps are no CUDA graphs: {reason}")

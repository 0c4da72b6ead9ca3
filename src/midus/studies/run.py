"""A whole study: every trial that has no row yet, in this process and in others that join it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from midus.data.rows import is_token_folder
from midus.errors import MidusError
from midus.studies.checking import check_trials
from midus.studies.choosing import choose, goes_on
from midus.studies.figures import said_of_texts_and_tasks
from midus.studies.folder import joined
from midus.studies.grid import final_trials, search_trials
from midus.studies.material import Material
from midus.studies.options import StudyOptions
from midus.studies.results import NotWritten, Row, add_result, is_done, read_results
from midus.studies.tasks import Tasks
from midus.studies.timing import Deadline
from midus.studies.trial import TrialRun, curve_steps
from midus.studies.trials import Trial, base_key
from midus.studies.workers import UNSEEN, Worker
from midus.training.options import TrainOptions
from midus.upscaling.method import Track

# Seconds between two looks at what other processes have ended.
_WAIT = 1.0


@dataclass(frozen=True)
class Progress:
    """How far a study is."""

    ran: int
    """Trials that ended in this call."""
    left: int
    """Trials that are known to be left; the final round is known once its search has ended."""
    is_out_of_time: bool


def run_study(
    study: StudyOptions,
    out: Path,
    *,
    time_limit: float | None = None,
    only: list[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    track: Track = lambda items, _: items,
    deadline: Deadline | None = None,
) -> Progress:
    """Runs what is left of a study, and leaves a row for each trial in ``out/results.jsonl``.

    Args:
        study: What to do.
        out: Folder of the study; a study that was stopped or killed goes on there.
        time_limit: Seconds after which it stops at the next step, to go on in another call.
        only: Methods to run; default: all.
        say: Is told in a sentence what happens.
        track: Wraps loops in a progress bar.
        deadline: Stands for ``time_limit``, with a clock of its own.

    Raises:
        MidusError: In the end, where some trial could not run; the others have.
    """
    deadline = deadline or Deadline(time_limit)
    every = search_trials(study)
    chosen = _chosen(study, only)
    trials = [trial for trial in every if trial.method in chosen]
    model, tokens = _sources(trials)
    tasks = Tasks(study.tasks, model) if study.tasks else None
    material = Material(model, tokens, study.texts)
    check_trials(trials, material.base.config)
    with joined(out, study, material) as worker:
        if not worker.sees_other_studies:
            say(UNSEEN)
        session = _Session(study, material, out, deadline, say, track, tasks, worker)
        session.read_base(every[0])
        if not session.run(trials):
            return Progress(session.ran, session.left(trials), is_out_of_time=True)
        finals = _finals(study, material.identity, read_results(out), chosen, say)
        done = session.run(finals)
        left = session.left(finals)
        if done:  # the process that began with the base may have been killed
            session.read_base(every[0])
        skipped = session.skipped()
    if skipped:
        raise MidusError(
            f"{session.ran} trials ran and {len(skipped)} could not; the first of them is "
            f"{skipped[0]}"
        )
    return Progress(session.ran, left, is_out_of_time=not done)


def _finals(
    study: StudyOptions,
    identity: str,
    rows: dict[str, Row],
    methods: list[str],
    say: Callable[[str], None],
) -> list[Trial]:
    """Trials of the final seeds, as far as the search has decided them."""
    finals: list[Trial] = []
    going = goes_on(study, identity, rows)
    for method in methods if study.final_seeds else []:
        choice = choose(study, identity, rows, method)
        if choice is None:
            say(f"{method}: trials are missing or all have failed, so there is no final round")
        elif going[method] is None:
            say(
                f"{method}: searches are left that decide if it is among the {study.finalists} best"
            )
        elif going[method]:
            finals += final_trials(study, method, choice.varied)
        else:
            say(f"{method}: not among the {study.finalists} best, so there is no final round")
    return finals


class _Session:
    """What the trials of one call have in common."""

    def __init__(
        self,
        study: StudyOptions,
        material: Material,
        out: Path,
        deadline: Deadline,
        say: Callable[[str], None],
        track: Track,
        tasks: Tasks | None,
        worker: Worker,
    ) -> None:
        self._study, self._identity, self._out = study, material.identity, out
        self._material = material
        self._deadline, self._say, self._tasks = deadline, say, tasks
        self._worker = worker
        self._runner = TrialRun(study, material, out, say, track, tasks, worker.solitude)
        self.ran = 0
        self._skipped: list[tuple[Trial, str]] = []
        self._tried: set[tuple[str, bool]] = set()

    def read_base(self, like: Trial) -> None:
        """The untouched base's row, once, and again where other tasks are asked for."""
        key = base_key(like.options, self._identity)
        with self._worker.claimed(key) as is_ours:
            found = read_results(self._out).get(key)
            is_lacking = found is None or (is_done(found) and not self._has_these_tasks(found))
            if is_ours and is_lacking:
                row = self._runner.untouched(like)
                add_result(self._out, row)
                self._say(f"the base as it came: {_said(row)}")

    def run(self, trials: list[Trial]) -> bool:
        """Runs what has not run and waits for what others run; False where time was up before."""
        self._tell_lacking(trials)
        has_waited = False
        while (is_over := self._go_through(trials)) is None:
            if not has_waited:
                self._say("waiting for trials that other processes run")
                has_waited = True
            time.sleep(_WAIT)
        return is_over

    def _go_through(self, trials: list[Trial]) -> bool | None:
        """Whether all have ended; False where time is up, None where others have some of them."""
        others_have_some = False
        rows = read_results(self._out)
        for number, trial in enumerate(trials, start=1):
            key = trial.key(self._identity)
            if (key, trial.is_final) in self._tried or self._is_done(trial, rows):
                continue
            if self._deadline.is_past():
                return False
            if self._material.is_being_grown(trial.options):
                others_have_some = True
                continue
            with self._worker.claimed(key) as is_ours:
                # It may have ended since its row was looked for.
                rows = read_results(self._out)
                if not is_ours:
                    others_have_some = True
                elif not self._is_done(trial, rows):
                    self._tried.add((key, trial.is_final))
                    if not self._run_one(trial, f"{number} of {len(trials)}", rows):
                        return False
        return None if others_have_some else True

    def _run_one(self, trial: Trial, count: str, rows: dict[str, Row]) -> bool:
        """Runs a trial; False where time was up before its end."""
        name = f"{trial.method}, {trial.setting or 'as it is'}, seed {trial.seed}"
        if trial.is_final and self._study.final_tokens is not None:
            name += f", {trial.tokens:,} tokens"
        self._say(f"{count}: {name}")
        key = trial.key(self._identity)
        with_tasks = self._is_scored(trial) and not self._has_these_tasks(rows.get(key, {}))
        try:
            row = self._runner.run(trial, key, self._deadline, with_tasks)
        except NotWritten:
            raise
        except MidusError as error:  # a missing package, say: the others can still run
            self._say(f"  skipped: {error}")
            self._skipped.append((trial, f"{name}: {error}"))
            return True
        if row is None:
            return False
        self.ran += 1
        self._say(f"  {_said(row)}")
        return True

    def skipped(self) -> list[str]:
        """What could not run here and has not run elsewhere since, and why."""
        rows = read_results(self._out)
        return [why for trial, why in self._skipped if not self._is_done(trial, rows)]

    def left(self, trials: list[Trial]) -> int:
        """How many have no row yet."""
        rows = read_results(self._out)
        return sum(not self._is_done(trial, rows) for trial in trials)

    def _is_done(self, trial: Trial, rows: dict[str, Row]) -> bool:
        row = rows.get(trial.key(self._identity))
        if row is None or not is_done(row):
            return row is not None
        # It may have run in the search, where models are not kept and have no tasks.
        if self._is_scored(trial) and not row.get("tasks"):
            return False
        model = row.get("model")
        return not trial.keep or (bool(model) and (self._out / str(model)).is_dir())

    def _is_scored(self, trial: Trial) -> bool:
        """Whether its model is measured on tasks."""
        return trial.is_final and self._tasks is not None

    def _has_these_tasks(self, row: Row) -> bool:
        return self._tasks is None or row.get("tasks_of") == self._tasks.identity

    def _tell_lacking(self, trials: list[Trial]) -> None:
        """Rows that ended before something was asked for: nothing would measure it any more."""
        rows = read_results(self._out)
        found = [(t, row) for t in trials if (row := rows.get(t.key(self._identity)))]
        tasks_of = self._tasks.identity if self._tasks else None
        lacking = [
            what
            for trial, row in found
            if (what := lacks(row, self._study, tasks_of if self._is_scored(trial) else None))
        ]
        without = [
            row
            for trial, row in found
            if self._is_scored(trial) and is_done(row) and not row.get("tasks")
        ]
        if without:
            num = sum(map(self._is_scored, trials))  # the search may have others among them
            self._say(f"{len(without)} of {num} final trials ended without tasks and run again")
        if lacking:
            names = sorted({name for what in lacking for name in what})
            self._say(
                f"{len(lacking)} of {len(trials)} trials ended without {', '.join(names)}; remove "
                "their lines from results.jsonl to run them again"
            )


def lacks(row: Row, study: StudyOptions, tasks_of: str | None = None) -> list[str]:
    """What the study asks for and a row does not have, and will not get.

    Args:
        row: Of a trial.
        study: What is asked for.
        tasks_of: Which tasks, for a final trial; one without any runs again.
    """
    if not is_done(row):
        return []
    missing = [name for name in study.measure if name not in row.get("measured", [])]
    points = {point["step"] for point in row["curve"]}
    if not points.issuperset(curve_steps(row["steps"], study.curve_points)):
        missing.append("points of the curve")
    if tasks_of and row.get("tasks") and row["tasks_of"] != tasks_of:
        missing.append("the tasks as they are asked for")
    return missing


def _chosen(study: StudyOptions, only: list[str] | None) -> list[str]:
    for name in only or []:
        if name not in study.methods:
            raise MidusError(
                f"the study has no method {name!r}; choose from {', '.join(study.methods)}"
            )
    return [name for name in study.methods if not only or name in only]


def _sources(trials: list[Trial]) -> tuple[str, str]:
    """The one base and the one token folder of all trials."""
    found = {(trial.options.model, _token_folder(trial.options)) for trial in trials}
    if len(found) > 1:
        raise MidusError(
            "methods differ in model or data.sources, which would compare those; say both once, "
            "under run"
        )
    return found.pop()


def _token_folder(options: TrainOptions) -> str:
    sources = options.data.sources
    if len(sources) != 1 or not is_token_folder(sources[0].path):
        raise MidusError(
            f"data.sources={[source.path for source in sources]} must be one token folder; make "
            "it with: midus data build … --held-out 0.02 --test 0.03"
        )
    return sources[0].path


def _said(row: Row) -> str:
    if row["status"] != "done":
        return str(row["status"]).replace("_", " ")
    words = [f"{name} {row[name]['perplexity']:.3f}" for name in ("validation", "test")]
    words += said_of_texts_and_tasks(row)
    if row.get("tokens_per_second"):
        words.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if row.get("peak_gb"):
        words.append(f"{row['peak_gb']:.1f} GB")
    return "perplexity " + ", ".join(words)

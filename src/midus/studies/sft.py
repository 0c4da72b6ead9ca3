"""Fine-tuning of a study's finalists: the base and every kept model, by one process or several.

Paper, Section 5.1: after continual pre-training all parameters are fine-tuned on instructions, at
one rate for every method. Each model is one run of `midus train`, then read as in the study.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from midus.errors import MidusError
from midus.models.fused_base import fuse_blocks
from midus.reports import conditions, write_json
from midus.studies.figures import said_of_texts_and_tasks
from midus.studies.finalists import (
    Finalist,
    check_kept,
    find_finalists,
    select_finalists,
    starting_source,
)
from midus.studies.folder import read_study_folder, visited
from midus.studies.grid import search_trials
from midus.studies.material import Material
from midus.studies.options import StudyOptions
from midus.studies.results import RESULTS_NAME, NotWritten, Row, add_result
from midus.studies.scoring import mean_loss, score, score_text
from midus.studies.sft_options import (
    FOLDER,
    Sft,
    begin_sft,
    checked_name,
    describe_sft,
    read_sft,
    read_sft_options,
)
from midus.studies.sft_rows import names_model, read_rows
from midus.studies.sft_run import (
    MERGED_NAME,
    TASKS_NAME,
    SftCallback,
    TimeIsUp,
    end_of,
    open_run,
    seconds_of,
    tidy_run,
)
from midus.studies.tasks import Tasks
from midus.studies.timing import Deadline
from midus.studies.workers import NO_ROOM, UNSEEN, Worker
from midus.training.checkpoint import is_full_disk, read_weights
from midus.training.continuing import MODEL_NAME
from midus.training.loss import use_chunked_loss
from midus.training.options import TrainOptions
from midus.training.run import RESULT_NAME, hardware, train
from midus.training.starting import start_model
from midus.upscaling.method import Track

_NO_MEMORY = (
    "memory does not hold it; lower trainer.per_device_train_batch_size for all models, under "
    "another --name"
)
# Seconds between looks at what other processes have ended.
_WAIT = 1.0


@dataclass(frozen=True)
class SftProgress:
    """How far a fine-tuning of finalists is."""

    name: str
    ran: int
    """Models that ended in this call."""
    left: int
    is_out_of_time: bool
    skipped: list[str]
    """What could not be fine-tuned, and why; the others have been."""


def run_sft(
    folder: Path,
    config: Path,
    *,
    name: str | None = None,
    settings: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    keep: bool = False,
    time_limit: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    track: Track = lambda items, _: items,
    deadline: Deadline | None = None,
) -> SftProgress:
    """Fine-tunes what has not been, and leaves a row a model in ``sft/NAME/results.jsonl``.

    Args:
        folder: Of a study that has kept final models.
        config: A file of `midus train` of stage sft; its model and output are replaced.
        name: Of the folder below ``sft``; default: the file's name.
        settings: ``a.b=value`` overrides of the file.
        only: Methods to fine-tune, ``untouched`` for the base; default: all.
        seeds: Of the study, whose models are fine-tuned; default: all.
        keep: Keep the fine-tuned models.
        time_limit: Seconds after which it stops at the next step, to go on in another call.
        say: Is told in a sentence what happens.
        track: Wraps loops in a progress bar.
        deadline: Stands for ``time_limit``, with a clock of its own.
    """
    deadline = deadline or Deadline(time_limit)
    study, identity = read_study_folder(folder)
    name = checked_name(config.stem if name is None else name)
    finalists = select_finalists(find_finalists(folder, study, identity), only, seeds)
    check_kept(finalists)
    base = search_trials(study)[0].options
    options = read_sft_options(config, list(settings), base.model)
    material = Material(base.model, base.data.sources[0].path, study.texts)
    sft = describe_sft(name, options)
    with visited(folder, material, lambda shared: begin_sft(folder, sft, shared)) as worker:
        sft = read_sft(folder, name)  # as it was begun, which keys are made of
        if not worker.sees_other_studies:
            say(UNSEEN)
        tasks = Tasks(study.tasks, base.model) if study.tasks else None
        session = _Session(
            folder, study, material, sft, options, tasks, deadline, say, track, worker
        )
        is_done = session.run(finalists, keep)
    ended = read_rows(folder, name)
    left = sum(sft.key(finalist) not in ended for finalist in finalists)
    skipped = [why for key, why in session.skipped.items() if key not in ended]
    return SftProgress(name, session.ran, left, not is_done, skipped)


class _Session:
    """What the runs of one call have in common."""

    def __init__(
        self,
        folder: Path,
        study: StudyOptions,
        material: Material,
        sft: Sft,
        options: TrainOptions,
        tasks: Tasks | None,
        deadline: Deadline,
        say: Callable[[str], None],
        track: Track,
        worker: Worker,
    ) -> None:
        self._folder, self._study, self._material = folder, study, material
        self._sft, self._options, self._tasks = sft, options, tasks
        self._deadline, self._say, self._track = deadline, say, track
        self._worker = worker
        self._out = folder / FOLDER / sft.name
        self._seen: set[str] = set()
        self.ran = 0
        self.skipped: dict[str, str] = {}
        """What could not be fine-tuned, and why, by key."""

    def run(self, finalists: list[Finalist], keep: bool) -> bool:
        """Fine-tunes what has no row and waits for what others have; False where time was up."""
        has_waited = False
        while (is_over := self._go_through(finalists, keep)) is None:
            if not has_waited:
                self._say("waiting for models that other processes fine-tune")
                has_waited = True
            time.sleep(_WAIT)
        return is_over

    def _go_through(self, finalists: list[Finalist], keep: bool) -> bool | None:
        """Whether all have ended; False where time is up, None where others have some of them."""
        others_have_some = False
        for number, finalist in enumerate(finalists, start=1):
            key = self._sft.key(finalist)
            if key in self._seen:
                continue
            if self._row(key) is None and self._deadline.is_past():
                return False
            with self._worker.claimed(f"{FOLDER}-{self._sft.name}-{key}") as is_ours:
                if not is_ours:
                    others_have_some = True
                elif not self._end(finalist, key, f"{number} of {len(finalists)}", keep):
                    return False
                else:
                    self._seen.add(key)
        return None if others_have_some else True

    def _end(self, finalist: Finalist, key: str, count: str, keep: bool) -> bool:
        """Fine-tunes a model that has no row, and tidies up after it; False where time was up."""
        run, row = self._out / finalist.name, self._row(key)
        if row is None:
            self._say(f"{count}: {finalist.said}")
            solitude, has_room = self._worker.solitude(), True
            try:
                row = self._fine_tune(finalist, key, run, keep)
            except (MidusError, OSError) as error:
                if is_full_disk(error):
                    raise NotWritten(
                        f"{run} cannot be written, as the disk is full; free some space and "
                        "run the same command again"
                    ) from error
                if not isinstance(error, MidusError):
                    raise
                self._skip(finalist, key, str(error))  # the others can still run
                return True
            except torch.OutOfMemoryError:
                has_room = False
            finally:
                self._material.release()
            if not has_room:
                is_shared = not self._worker.has_been_alone(solitude)
                self._skip(finalist, key, NO_ROOM if is_shared else _NO_MEMORY)
                return True
            if row is None:
                return False
            add_result(self._out, row)
            self.ran += 1
            self._say(f"  {_said(row)}")
        elif keep and not row.get("model"):
            self._say(
                f"{finalist.said} has ended and was not kept; remove its line from "
                f"{RESULTS_NAME} to run it again"
            )
        # Of a row that a call before this one wrote, too: it may have been killed right after.
        tidy_run(run, keeps_model=self._is_kept(run))
        return True

    def _fine_tune(self, finalist: Finalist, key: str, run: Path, keep: bool) -> Row | None:
        """One run of `midus train`, and the row of its model; None where time was up."""
        open_run(run, key, self._is_kept(run))
        source = starting_source(finalist, self._material, run / MERGED_NAME)
        options = replace(self._options, model=source, output=str(run))
        since = self._worker.solitude()
        callback = SftCallback(self._deadline, lambda: self._worker.has_been_alone(since))
        try:
            result = train(
                options, resume=True, track=self._track, say=self._say, callbacks=[callback]
            )
        except TimeIsUp:
            return None
        self._material.release()
        measured = self._measure(finalist, options, run)
        if measured is None:
            return None
        seconds = seconds_of(run)
        told = json.loads((run / RESULT_NAME).read_text())
        return {
            "key": key,
            "sft": self._sft.name,
            "study": self._study.name,
            "method": finalist.method,
            "seed": finalist.seed,
            "trial": finalist.key,
            "steps": result.steps,
            "tokens": result.tokens,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds if seconds else None,
            **{name: told[name] for name in ("examples", "trainable")},
            "held_out": {
                when: {kind: result.losses[f"{when}_{kind}"] for kind in ("loss", "perplexity")}
                for when in ("before", "after")
            },
            **measured,
            **({"model": str((run / MODEL_NAME).relative_to(self._folder))} if keep else {}),
            "options": options.to_dict(),
            "hardware": hardware(),
            "conditions": conditions(),
        }

    def _measure(self, finalist: Finalist, options: TrainOptions, run: Path) -> Row | None:
        """What the study measures, of the weights as they trained; None where time was up."""
        model = start_model(options).model
        read_weights(model, end_of(run))
        device, batch = self._material.device, self._study.eval_batch_size
        model = model.to(device)
        if options.fused_blocks:
            fuse_blocks(model)
        use_chunked_loss(model, options.loss_chunk)
        like = self._like(finalist)
        path = run / TASKS_NAME
        before = json.loads(path.read_text()) if path.is_file() else {}
        row: Row = before.get("row") or {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "test": score(
                mean_loss(model, self._material.sequences("test", like.data.seq_len), like, batch)
            ),
            "texts": {
                name: score_text(model, text, like, batch, device)
                for name, text in self._material.texts.items()
            },
        }
        if self._tasks is None:
            return row
        results = before.get("results", {}) if before.get("of") == self._tasks.identity else {}
        measured: Row = {"row": row, "of": self._tasks.identity, "results": results}
        write_json(path, measured)  # what was read so far outlives a kill, too
        solitude = self._worker.solitude()
        is_whole = self._tasks.measure(model, like, results, self._say, self._deadline.is_past)
        shared = self._tasks.without_memory(results)
        if self._worker.has_been_alone(solitude):
            shared = []
        if is_whole and not shared:
            return row | self._tasks.scores(results)
        for name in shared:
            del results[name]
        write_json(path, measured)
        if is_whole:
            raise MidusError(NO_ROOM)
        return None

    def _like(self, finalist: Finalist) -> TrainOptions:
        """The options its row in the study was read with; precision and length count."""
        if finalist.row:
            return TrainOptions.from_dict(finalist.row["options"])
        return search_trials(self._study)[0].options

    def _row(self, key: str) -> Row | None:
        return read_rows(self._folder, self._sft.name).get(key)

    def _is_kept(self, run: Path) -> bool:
        return names_model(self._folder, self._sft.name, run / MODEL_NAME)

    def _skip(self, finalist: Finalist, key: str, why: str) -> None:
        self._say(f"  skipped: {why}")
        self.skipped[key] = f"{finalist.said}: {why}"


def _said(row: Row) -> str:
    before, after = (row["held_out"][when]["loss"] for when in ("before", "after"))
    words = [f"held-out loss {_number(before)} -> {_number(after)}"]
    words += said_of_texts_and_tasks(row)
    return ", ".join(words)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"

"""One trial from start to row: grown, trained, read on validation, test and other texts."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from midus.errors import MidusError
from midus.models.atomic import atomic_folder
from midus.models.loading import load_tokenizer
from midus.reports import conditions
from midus.studies.loop import Loop
from midus.studies.material import Material
from midus.studies.measures import PartNorms, slot_usage, turned_down, value_ranks
from midus.studies.options import StudyOptions
from midus.studies.results import Row, add_result, is_done
from midus.studies.scoring import mean_loss, score, score_text
from midus.studies.tasks import Tasks
from midus.studies.timing import Deadline, Pace, Stopwatch
from midus.studies.trials import UNTOUCHED, Trial, base_key
from midus.studies.unfinished import drop_unfinished, load_unfinished, save_unfinished
from midus.studies.workers import NO_ROOM
from midus.training.checkpoint import write_weights
from midus.training.freezing import count_trainable
from midus.training.loss import use_chunked_loss
from midus.training.run import hardware
from midus.upscaling.method import Track

MODELS_NAME = "models"
Say = Callable[[str], None]
# Every how many steps a loss that is no number is looked for.
_LOOK = 25


@dataclass
class _Trained:
    """A training that has ended, or that the clock has stopped."""

    loop: Loop
    row: Row | None
    """What became of it; None where time was up."""
    facts: Row
    """What it takes to go on, besides the loop."""


class TrialRun:
    """Runs one trial.

    Args:
        study: The study it is of.
        material: Base, tokens and texts.
        out: Folder of the study.
        say: Is told in a sentence what happens.
        track: Wraps loops in a progress bar.
        tasks: What final models are measured on besides.
        solitude: The same number until another process comes to the device, None while one is
            there: its speed is nobody's.
    """

    def __init__(
        self,
        study: StudyOptions,
        material: Material,
        out: Path,
        say: Say,
        track: Track,
        tasks: Tasks | None = None,
        solitude: Callable[[], int | None] = lambda: 0,
    ) -> None:
        self._study, self._material, self._out = study, material, out
        self._say, self._track, self._tasks = say, track, tasks
        self._solitude = solitude
        self._told: set[str] = set()
        keeps = any(method.keep for method in study.methods.values())
        # Before the first trial: a training must not be lost to a tokenizer that is not there.
        self._tokenizer = load_tokenizer(material.source) if keeps else None

    def run(
        self, trial: Trial, key: str, deadline: Deadline, with_tasks: bool = False
    ) -> Row | None:
        """Trains, and writes the trial's row; None where time was up before its end."""
        try:
            return self._run(trial, key, deadline, self._tasks if with_tasks else None)
        finally:
            self._material.release()

    def _run(self, trial: Trial, key: str, deadline: Deadline, tasks: Tasks | None) -> Row | None:
        began = time.perf_counter()
        device = self._material.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trained: _Trained | None = None
        ended: Row | None = {"status": "out_of_memory"}
        is_shared = False
        solitude = self._solitude()
        try:
            trained = self._train(trial, key, deadline)
            ended = trained.row
        except torch.OutOfMemoryError:
            is_shared = not self._has_been_alone(solitude)
        if is_shared:  # not inside the handler: an exception holds the model it came from
            raise MidusError(NO_ROOM)
        if ended is None:
            return None
        row = {
            **self._facts(trial, key),
            **ended,
            "seconds": time.perf_counter() - began,
            "hardware": hardware(),
            "conditions": conditions(),
        }
        # The figures first: they must not be lost to what keeps the model from being written.
        add_result(self._out, row)
        if trained and tasks and is_done(row):
            scores = self._on_tasks(trained, tasks, trial, key, deadline)
            if scores is None:
                return None
            row |= scores
            add_result(self._out, row)
        if trained and trial.keep and is_done(row):
            self._keep(trained.loop.model, trial, row)
        drop_unfinished(self._out, key)
        return row

    def untouched(self, trial: Trial) -> Row:
        """The row of the base as it came, read as any trial's model is."""
        options = replace(
            trial.options, upscale=None, control="none", key_start="random", trainable="all"
        )
        model = self._material.start(options)
        use_chunked_loss(model, options.loss_chunk)
        key = base_key(options, self._material.identity)
        row = self._facts(replace(trial, method=UNTOUCHED, varied={}, options=options), key)
        row |= {"trainable": 0, "parameters": _count(model)}
        row |= self._scores(model, trial) | {"hardware": hardware(), "conditions": conditions()}
        if self._tasks and is_done(row):
            results: Row = {}
            solitude = self._solitude()
            self._tasks.measure(model, options, results, self._say)
            if self._tasks.without_memory(results) and not self._has_been_alone(solitude):
                raise MidusError(NO_ROOM)
            row |= self._tasks.scores(results)
        del model
        self._material.release()
        return row

    def _train(self, trial: Trial, key: str, deadline: Deadline) -> _Trained:
        options, study, device = trial.options, self._study, self._material.device
        model = self._material.start(options, self._track)
        sequences = self._material.sequences("train", options.data.seq_len, options.data.max_tokens)
        loop = Loop(model, options, sequences)
        self._tell_once(loop.why_not_graphed)
        earlier = load_unfinished(self._out, key, loop, self._say) or {}
        watch = Stopwatch(device, earlier.get("tokens", 0), earlier.get("seconds", 0.0))
        curve: list[Row] = earlier.get("curve", [])
        solitude = self._solitude()
        # Steps on two kinds of device have no speed together.
        is_alone = earlier.get("alone", True) and earlier.get("hardware", hardware()) == hardware()
        norms = PartNorms(model) if "gradients" in study.measure else None
        points = curve_steps(loop.num_steps, study.curve_points)
        pace = Pace(deadline.has_limit and device.type == "cuda")
        a_step = options.batch_size * options.data.seq_len
        row: Row = {
            "steps": loop.num_steps,
            "tokens": loop.num_steps * a_step,
            "trainable": count_trainable(model),
            "parameters": _count(model),
            "rates": loop.rates,
        }
        while loop.done < loop.num_steps:
            if deadline.is_past():
                watch.stop()
                facts = {"tokens": watch.tokens, "seconds": watch.seconds, "curve": curve}
                facts |= {"alone": is_alone and self._has_been_alone(solitude)}
                facts |= {"hardware": hardware()}
                save_unfinished(self._out, key, loop, facts)
                return _Trained(loop, None, facts)
            is_point = loop.done + 1 in points
            loop.step(norms.take if norms and is_point else None)
            watch.count(a_step)
            pace.step()
            row["graphed"] = loop.is_graphed
            if (is_point or loop.done % _LOOK == 0) and not math.isfinite(loop.loss.item()):
                row |= {"status": "diverged", "step": loop.done, "curve": curve}
                return _Trained(loop, row, {})
            if is_point:
                is_alone = is_alone and self._has_been_alone(solitude)
                with watch.paused():
                    curve.append(self._point(loop, trial, curve, norms))
        watch.stop()
        self._tell_once(loop.why_not_graphed)
        rate = watch.rate() if is_alone else None  # the last step is a point, so it was looked at
        row |= {"tokens_per_second": rate, "peak_gb": _peak_gb(device), "curve": curve}
        row |= self._scores(model, trial)
        row |= {"measures": self._measures(model, trial)}
        facts = {"tokens": watch.tokens, "seconds": watch.seconds, "curve": curve}
        facts |= {"alone": is_alone, "tasks": earlier.get("tasks", {})}
        return _Trained(loop, row, facts)

    def _on_tasks(
        self, trained: _Trained, tasks: Tasks, trial: Trial, key: str, deadline: Deadline
    ) -> Row | None:
        """Its scores; None where time was up, and what it has so far is kept with its state."""
        before = trained.facts["tasks"]
        results = before.get("results", {}) if before.get("of") == tasks.identity else {}
        trained.loop.end()
        self._material.release()
        model, solitude = trained.loop.model, self._solitude()
        is_whole = tasks.measure(model, trial.options, results, self._say, deadline.is_past)
        shared = tasks.without_memory(results)
        if self._has_been_alone(solitude):
            shared = []
        if is_whole and not shared:
            return tasks.scores(results)
        results = {name: result for name, result in results.items() if name not in shared}
        facts = {**trained.facts, "tasks": {"of": tasks.identity, "results": results}}
        save_unfinished(self._out, key, trained.loop, facts)
        if is_whole:
            raise MidusError(NO_ROOM)
        return None

    def _point(self, loop: Loop, trial: Trial, curve: list[Row], norms: PartNorms | None) -> Row:
        options = trial.options
        validation = self._material.sequences("held_out", options.data.seq_len)
        since = loop.done - (curve[-1]["step"] if curve else 0)
        point: Row = {
            "step": loop.done,
            "tokens": loop.done * options.batch_size * options.data.seq_len,
            "train_loss": loop.take_loss(since),
            "validation_loss": mean_loss(
                loop.model, validation, options, self._study.eval_batch_size
            ),
            "grad_norm": float(loop.grad_norm),
        }
        if norms:
            point["grad_norms"] = norms.values()
        self._say(
            f"  {point['tokens']:>13,} tokens: training {point['train_loss']:.4f}, "
            f"validation {point['validation_loss']:.4f}"
        )
        return point

    def _scores(self, model: Any, trial: Trial) -> Row:
        """How it ended: done only where validation and test are both numbers."""
        options, batch = trial.options, self._study.eval_batch_size
        splits = {"validation": "held_out", "test": "test"}
        scores: Row = {
            name: score(
                mean_loss(
                    model, self._material.sequences(split, options.data.seq_len), options, batch
                )
            )
            for name, split in splits.items()
        }
        scores["texts"] = {
            name: score_text(model, text, options, batch, self._material.device)
            for name, text in self._material.texts.items()
        }
        is_number = all(scores[name]["loss"] is not None for name in splits)
        return {"status": "done" if is_number else "diverged", **scores}

    def _measures(self, model: Any, trial: Trial) -> Row:
        options = trial.options
        measures: Row = {}
        if "slots" in self._study.measure:
            validation = self._material.sequences("held_out", options.data.seq_len)
            batch = self._study.eval_batch_size
            measures["slots"] = slot_usage(model, validation, options, batch)
        if "rank" in self._study.measure:
            measures["value_ranks"] = value_ranks(model)
        if "gates" in self._study.measure:
            measures["gates"] = turned_down(model, lambda: self._scores(model, trial))
        return {name: value for name, value in measures.items() if value}

    def _keep(self, model: Any, trial: Trial, row: Row) -> None:
        """Writes the trained model and, as another line, where it is; says so if it cannot."""
        name = f"{MODELS_NAME}/{row['key']}"
        try:
            self._write_model(model, trial, self._out / name)
        except (MidusError, OSError) as error:
            self._say(f"  the model is not kept ({error}); the same command will train it again")
            return
        add_result(self._out, {**row, "model": name})

    def _write_model(self, model: Any, trial: Trial, folder: Path) -> None:
        """In the base's type: a delta, adapters, or whole."""
        record = getattr(model, "peft_config", None)
        frozen = any(not p.requires_grad for p in model.parameters())
        # A folder of adapters, as a kill may leave it without its line, has no config.json by which
        # it could be replaced.
        with atomic_folder(folder, overwrite=True, keep_others=record is not None) as work:
            write_weights(
                model,
                work,
                delta=frozen and record is None and trial.options.control == "none",
                keep=True,
                tokenizer=self._tokenizer,
                dtype=self._material.base.dtype,
            )

    def _facts(self, trial: Trial, key: str) -> Row:
        return {**trial_facts(self._study, trial, key), "identity": self._material.identity}

    def _has_been_alone(self, since: int | None) -> bool:
        """Whether no other process has been there since; `since` is the solitude of then."""
        return since is not None and self._solitude() == since

    def _tell_once(self, reason: str) -> None:
        if reason and reason not in self._told:
            self._told.add(reason)
            self._say(f"  steps are no CUDA graphs: {reason}")


def curve_steps(num_steps: int, num_points: int) -> list[int]:
    """The last step, half of it, a quarter and so on; each step once."""
    return sorted({max(1, math.ceil(num_steps / 2**i)) for i in range(num_points)})


def trial_facts(study: StudyOptions, trial: Trial, key: str) -> Row:
    """What a row says before anything has run."""
    return {
        "key": key,
        "study": study.name,
        "method": trial.method,
        "setting": trial.setting,
        "varied": trial.varied,
        "seed": trial.seed,
        "options": trial.options.to_dict(),
        "measured": study.measure,
    }


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _peak_gb(device: torch.device) -> float | None:
    """None on a CPU, where the process holds more than the trial."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 1e9

"""What a run says while it goes: a bar on terminals, lines elsewhere, metrics.jsonl always."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from midus.training.checkpoint import refuse_non_finite, replace_text
from midus.training.optim import group_name

METRICS_NAME = "metrics.jsonl"


class MetricsCallback(TrainerCallback):
    """Adds rates, throughput and memory to what is logged, and appends it to a file.

    Args:
        trainer: The trainer whose log it adds to.
        run: Folder of the run.
    """

    def __init__(self, trainer: Any, run: Path) -> None:
        self._trainer = trainer
        self._path = run / METRICS_NAME
        self._clock = time.perf_counter()
        self._clock_tokens = 0
        self._rates: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock, self._clock_tokens = time.perf_counter(), state.num_input_tokens_seen
        if state.is_world_process_zero:
            _forget_later_steps(self._path, state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Read before the step: afterwards the schedule has moved on.
        for group in self._trainer.optimizer.param_groups:
            self._rates[f"lr/{group_name(group)}"] = group["lr"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves evaluations and saves out of the throughput."""
        began = time.perf_counter()
        yield
        self._clock += time.perf_counter() - began

    def extra(self, logs: dict[str, float], state: Any) -> dict[str, float]:
        """What the trainer's own log lacks."""
        tokens = state.num_input_tokens_seen
        extra: dict[str, float] = {"tokens": tokens}
        if "loss" in logs:
            now = time.perf_counter()
            extra |= self._rates
            extra["tokens_per_second"] = (tokens - self._clock_tokens) / (now - self._clock)
            extra["peak_memory_gb"] = peak_memory() / 1e9
            self._clock, self._clock_tokens = now, tokens
        return extra

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if state.is_world_process_zero and logs:
            line = {"step": state.global_step, **logs}
            with self._path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False, default=float) + "\n")


class GuardCallback(TrainerCallback):
    """Stops at a loss or gradient that is not a number, before the weights take it in."""

    def __init__(self, trainer: Any, run: Path) -> None:
        self._trainer = trainer
        self._run = run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        norm = trainer.grad_norm
        if norm is None:  # gradients are not clipped
            norm = _gradient_norm(trainer.model)
        found = {"loss": trainer._tr_loss.item(), "gradient norm": float(norm)}
        refuse_non_finite(found, state.global_step + 1, self._run)


def _gradient_norm(model: Any) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    return math.sqrt(sum(grad.float().square().sum().item() for grad in local))


class ProgressCallback(TrainerCallback):
    """A bar with loss, tokens/s and time left on a terminal; a line a log elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._latest = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Eta

        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            Eta(),
            TextColumn("{task.fields[said]}"),
            console=Console(stderr=True),
        )
        self._bar.start()
        self._task = self._bar.add_task(
            "", total=state.max_steps, completed=state.global_step, said=""
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step, said=self._latest)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        said = _said(logs)
        if said and self._bar is not None:
            if "eval_loss" in logs:
                self._bar.console.print(f"step {state.global_step}: {said}")
            else:
                self._latest = said
        elif said:
            print(f"step {state.global_step} of {state.max_steps}: {said}", file=sys.stderr)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Puts the terminal back, whatever ended the run."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _said(logs: dict[str, float]) -> str:
    if "eval_loss" in logs:
        return f"held-out loss {logs['eval_loss']:.4f}, perplexity {logs['eval_perplexity']:.3f}"
    if "loss" in logs:
        speed = (
            f", {logs['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in logs else ""
        )
        return f"loss {logs['loss']:.4f}{speed}"
    return ""


def peak_memory() -> int:
    """Most bytes in use so far: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; a last line that a kill cut short is left out."""
    path = run / METRICS_NAME
    rows = []
    for line in path.read_text().split("\n") if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _forget_later_steps(path: Path, step: int) -> None:
    """Drops what a killed run logged after the checkpoint it resumes from."""
    if not path.is_file():
        return
    kept = [row for row in read_metrics(path.parent) if row["step"] <= step and step > 0]
    replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))

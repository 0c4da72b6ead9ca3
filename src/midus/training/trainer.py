"""Hugging Face's trainer with the paper's optimizer, our checkpoints and an exact held-out loss.

`MidusTrainerMixin` goes before `transformers.Trainer` or TRL's `SFTTrainer`; both take it as it is.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import rotate_checkpoints

from midus.errors import MidusError
from midus.models.slots import counting_slots
from midus.training.checkpoint import (
    disk_errors_named,
    last_checkpoint,
    publish,
    read_weights,
    refuse_non_finite,
    staged_name,
    write_weights,
)
from midus.training.distributed import keep_sharding_on_cpu
from midus.training.graphed_trainer import GraphedStepsMixin
from midus.training.loss import IGNORED
from midus.training.optim import constant_memory_schedule, make_clipping, make_optimizer
from midus.training.optimizer_options import OptimizerOptions
from midus.training.optimizer_state import (
    is_sharded,
    load_optimizer,
    save_optimizer,
    state_file,
)

_SCHEDULER = "scheduler.json"
# Of the held-out tokens, so many count for the use of slots: on each rank its own.
_SLOT_TOKENS = 16_384


class MidusTrainerMixin:
    """What a run of ours does differently from the trainer it is mixed into."""

    optimizer_options: OptimizerOptions
    saves_delta: bool
    extra_metrics: Callable[[dict[str, float], Any], dict[str, float]]
    paused: Callable[[], AbstractContextManager[None]]

    def __init__(
        self,
        *args: Any,
        optimizer_options: OptimizerOptions,
        saves_delta: bool,
        tokenizer: Any,
        **kwargs: Any,
    ) -> None:
        self.optimizer_options = optimizer_options
        self.saves_delta = saves_delta
        self.tokenizer = tokenizer
        self.extra_metrics = lambda logs, state: {}
        self.paused = nullcontext
        self.grad_norm: Any = None
        self.streams: list[float] | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's; sharding is kept on a CPU, where accelerate would drop it."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        keep_sharding_on_cpu(self)

    # --- the paper's optimizer

    def create_optimizer(self: Any, model: Any = None) -> Any:
        """AdamW (or what ``trainer.optim`` names) on the paper's groups."""
        if self.optimizer is None:
            options = self.optimizer_options
            trained = self.model if model is None else model
            kind = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = make_optimizer(trained, options, kind, self.streams)
        return self.optimizer

    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule, with the memory's rate constant."""
        if self.lr_scheduler is None:
            inner = optimizer or self.optimizer
            inner = getattr(inner, "optimizer", inner)  # accelerate's wrapper
            self.lr_scheduler = constant_memory_schedule(
                inner,
                num_training_steps,
                self.optimizer_options.warmup_ratio,
                self.optimizer_options.schedule,
                self.optimizer_options.decay_ratio,
                self.optimizer_options.parts,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # --- what is watched

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With rates of every group, throughput and memory.

        The trainer's own summary in the end is left out: after a resumption it divides the whole
        run by the time since.
        """
        if "train_runtime" in logs:
            return
        super().log({**logs, **self.extra_metrics(logs, self.state)}, *args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self: Any, model: Any) -> Any:
        parts = self.optimizer_options.parts
        if any(own.max_grad_norm is not None for own in parts.values()):
            self.grad_norm = make_clipping(self._bare_model(), self.args.max_grad_norm, parts)()
        else:
            self.grad_norm = super()._clip_grad_norm(model)  # type: ignore[misc]
        return self.grad_norm

    # --- one loss for text and instructions

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's own chunked loss; TRL's would ask for all logits to report accuracies."""
        return Trainer.compute_loss(self, model, inputs, *args, **kwargs)

    def evaluate(
        self: Any,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Held-out loss: the mean over all predicted tokens, however long their sequences are."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        with self.paused(), counting_slots(self._bare_model(), _SLOT_TOKENS) as counters:
            total = self._held_out_sums(dataset)
            mean = (total[0] / total[1].clamp_min(1)).item()
            refuse_non_finite(
                {"held-out loss": mean}, self.state.global_step, Path(self.args.output_dir)
            )
            metrics = {
                f"{metric_key_prefix}_loss": mean,
                f"{metric_key_prefix}_perplexity": math.exp(min(mean, 700.0)),
                f"{metric_key_prefix}_tokens": total[1].item(),
            }
            slots: dict[str, float] = {}
            for index, counter in counters.items():
                usage = counter.usage()
                slots |= {
                    f"slots_used/{index}": usage.used,
                    f"slots_entropy/{index}": usage.entropy,
                }
            self.log({**metrics, **slots})
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _held_out_sums(self: Any, dataset: Any) -> Tensor:
        """Sum of the losses and number of predicted tokens, over all ranks."""
        model = self.model_wrapped
        was_training = model.training
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for inputs in self._held_out_batches(dataset):
            count = (inputs["labels"][:, 1:] != IGNORED).sum()
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = model(**inputs).loss
            total += torch.stack([loss.double() * count, count.double()])
        model.train(was_training)
        return self.accelerator.reduce(total, "sum")  # type: ignore[no-any-return]

    def _held_out_batches(self: Any, dataset: Any) -> Iterator[dict[str, Tensor]]:
        """This rank's share; every rank has as many batches, and no sequence counts twice."""
        rank, world, size = (
            self.args.process_index,
            self.args.world_size,
            self.args.per_device_eval_batch_size,
        )
        mine = range(rank, math.ceil(len(dataset) / world) * world, world)
        for start in range(0, len(mine), size):
            indices = mine[start : start + size]
            inputs = self.data_collator([dataset[i % len(dataset)] for i in indices])
            for row, i in enumerate(indices):
                if i >= len(dataset):
                    inputs["labels"][row] = IGNORED
            yield self._prepare_inputs(dict(inputs))

    # --- checkpoints

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """As the trainer's, written aside and renamed when whole."""
        run = Path(self._get_output_dir(trial=trial))
        target = run / f"checkpoint-{self.state.global_step}"
        staged = staged_name(target)
        self.store_flos()
        with self.paused(), disk_errors_named(target, last_checkpoint(run)):
            self.save_model(str(staged), _internal_call=True)
            self._note_best(run, target)
            if not self.args.save_only_model:
                self._wait()
                self._save_optimizer_and_scheduler(str(staged))
                self._save_scaler(str(staged))
                self._save_rng_state(str(staged))
            if self.args.should_save:
                self._note_callbacks()
                self.state.save_to_json(str(staged / "trainer_state.json"))
            self._wait()
            if self.args.should_save:
                publish(target)
        self._wait()
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )

    def _note_best(self: Any, run: Path, target: Path) -> None:
        if self.state.best_global_step:
            best = run / f"checkpoint-{self.state.best_global_step}"
            if best == target or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _note_callbacks(self: Any) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()

    def _wait(self: Any) -> None:
        self.accelerator.wait_for_everyone()

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Model folder and tokenizer; no pickled training arguments."""
        write_weights(
            self._bare_model(),
            Path(output_dir or self.args.output_dir),
            delta=self.saves_delta,
            keep=self.args.should_save,
            tokenizer=self.tokenizer,
        )

    def _bare_model(self: Any) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        model = self._bare_model()
        sharded = is_sharded(model)
        if self.args.should_save or sharded:
            rank, world = self.args.process_index, self.args.world_size
            path = state_file(Path(output_dir), rank, world, sharded)
            save_optimizer(self._bare_optimizer(), model, path)
        if self.args.should_save:
            values = {"world_size": self.args.world_size, **_schedule(self.lr_scheduler)}
            (Path(output_dir) / _SCHEDULER).write_text(json.dumps(values))

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        model = self._bare_model()
        rank, world = self.args.process_index, self.args.world_size
        schedule = json.loads((Path(checkpoint) / _SCHEDULER).read_text())
        saved_by = schedule.pop("world_size")
        if saved_by != world:
            raise MidusError(
                f"{checkpoint} was saved by {saved_by} processes and this run has {world}; resume "
                "with as many"
            )
        path = state_file(Path(checkpoint), rank, world, is_sharded(model))
        load_optimizer(self._bare_optimizer(), model, path)
        self.lr_scheduler.load_state_dict(schedule)

    def _bare_optimizer(self: Any) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        read_weights(self._bare_model(), Path(resume_from_checkpoint))

    def _load_best_model(self: Any) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    # --- best checkpoint and early stop, through a resumption too

    def _determine_best_metric(self: Any, metrics: dict[str, float], trial: Any) -> bool:
        is_best: bool = super()._determine_best_metric(metrics, trial)  # type: ignore[misc]
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True  # or the best would be gone by the next save
        return is_best

    def _init_training_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        trained = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        # A run may have moved since.
        run = Path(self.args.output_dir)
        self._note_best(run, run)
        return trained

    def _load_callback_state(self: Any) -> None:
        """Lets callbacks go on where they were; the trainer would make them anew."""
        for callback in self.callback_handler.callbacks:
            stored = self.state.stateful_callbacks.get(type(callback).__name__)
            if isinstance(callback, ExportableState) and isinstance(stored, dict):
                for name, value in stored.get("attributes", {}).items():
                    setattr(callback, name, value)

    def take_finished(self: Any, checkpoint: Path) -> bool:
        """Whether a checkpoint is a run's last; if so its state and weights are taken over."""
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        control = state.stateful_callbacks.get("TrainerControl", {}).get("args", {})
        if state.global_step < state.max_steps and not control.get("should_training_stop"):
            return False
        self.state = state
        run = Path(self.args.output_dir)
        self._note_best(run, checkpoint)
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        if self.args.should_save:
            read_weights(self._bare_model(), Path(best) if best else checkpoint)
        return True


def _schedule(scheduler: Any) -> dict[str, Any]:
    """A schedule's state without its functions, which the options make again."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    state = {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}
    return {**state, "lr_lambdas": [None] * len(scheduler.lr_lambdas)}


class CptTrainer(MidusTrainerMixin, GraphedStepsMixin, Trainer):  # type: ignore[misc]  # a mixin sees it as Any
    """Continual pre-training on packed text."""


def sft_trainer_class() -> Any:
    """Supervised fine-tuning; TRL is imported where it is used."""
    from trl import SFTTrainer

    return type("SftTrainer", (MidusTrainerMixin, SFTTrainer), {"__doc__": "SFT on instructions."})

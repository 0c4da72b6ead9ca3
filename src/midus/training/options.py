"""What one training run is: a YAML file, key for key the dataclasses below.

Options of the run are ours; everything else of Hugging Face's trainer passes through untouched
under ``trainer:``. An unknown key is an error, and every run saves the options it resolved.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from midus.config import MemoryConfig, UpscaleConfig
from midus.data.options import DataOptions
from midus.errors import MidusError
from midus.training.reading import build_options, read_yaml
from midus.training.recipes import with_recipe

STAGES = ("cpt", "sft")
RECIPES = ("paper", "short")
PRECISIONS = ("mixed", "pure_bf16", "float32", "float64")
SCHEDULES = ("cosine", "linear", "constant")
TRAINABLE = ("auto", "inserted", "all")
CONTROLS = ("none", "lora", "last_layers")
SHARDINGS = ("none", "fsdp2")
MATRICES = ("adamw", "muon")
PARTS = ("attention", "keys", "values", "value_proj", "output_proj", "bypass", "norms")
KEY_STARTS = ("random", "queries")
# How fast rates fall with the steps of a run, where not said otherwise.
_STEPS_POWER = 1 / 3

# What the recipes set where the file says nothing. The paper's rates suit its 12,100 steps; in a
# short run the table that starts at zero needs a higher one.
_RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "cpt": {"lr": 1e-4, "weight_decay": 1e-6, "adam_beta2": 0.999},
        "sft": {"lr": 1e-5, "weight_decay": 1e-6, "adam_beta2": 0.999},
    },
    "short": {
        "cpt": {"lr": 1e-3, "memory_lr": 1e-2, "weight_decay": 0.0, "adam_beta2": 0.95},
        "sft": {"lr": 1e-4, "memory_lr": 1e-3, "weight_decay": 0.0, "adam_beta2": 0.95},
    },
}

# Where the trainer's own argument would say the same thing a second time.
_OWNED = {
    "output_dir": "output",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_ratio": "optimizer.warmup_ratio",
    "warmup_steps": "optimizer.warmup_ratio",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_scheduler_kwargs": "optimizer.schedule",
    "bf16": "precision",
    "fp16": "precision",
    "load_best_model_at_end": "keep_best",
    "metric_for_best_model": "keep_best",
    "greater_is_better": "keep_best",
    "disable_tqdm": "the progress bar, which shows on terminals only",
    "use_liger_kernel": "loss_chunk",
    "max_length": "max_length",
    "seed": "seed",
    "data_seed": "seed",
    "adam_beta2": "optimizer.adam_beta2",
    "gradient_accumulation_steps": "batch_size",
    "include_num_input_tokens_seen": "metrics.jsonl, which counts tokens anyway",
    "logging_nan_inf_filter": "the guard against NaN, which is always on",
    "remove_unused_columns": "data.row_format, which decides the columns",
    "restore_callback_states_from_checkpoint": "--resume, which restores them anyway",
    "save_only_model": "trainer.save_total_limit, since a checkpoint must be able to resume",
    "use_cache": "the config of the model",
    "fsdp": "sharding",
}


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """How one part of the blocks trains, where not like the rest (beyond the paper)."""

    lr: float | None = None
    """Largest rate; default: lr, for keys and values memory_lr."""
    relative_lr: float | None = None
    """In place of lr: a multiple of the size of the base's weights."""
    for_steps: int | None = None
    """Steps that relative_lr is for: a run of N has it times (for_steps / N) ** steps_power."""
    steps_power: float | None = None
    """How fast relative_lr falls with the steps of a run; default: 1/3, like the whole run's."""
    schedule: str | None = None
    """cosine, linear or constant; default: the run's, for keys and values constant."""
    warmup_ratio: float | None = None
    """Share of the steps in which the rate rises; default: the run's, for keys and values 0."""
    decay_ratio: float | None = None
    """Share of the steps after the warm-up, the last ones, in which it falls; default: the run's"""
    weight_decay: float | None = None
    """Weight decay; default: the run's, for keys and values 0."""
    max_grad_norm: float | None = None
    """Clip the part's gradient at this norm, alone; default: with all others, as trainer has it."""
    by_stream: bool = False
    """Each block at a rate in proportion to the stream before it, their geometric mean as given."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.schedule is not None:
            _one_of("schedule of a part", self.schedule, SCHEDULES)
        for name, largest in (
            ("lr", 10),
            ("warmup_ratio", 1),
            ("decay_ratio", 1),
            ("weight_decay", 10),
            ("max_grad_norm", 1e6),
        ):
            _number(f"{name} of a part", getattr(self, name), 0.0, largest, optional=True)
        _check_relative("a part's ", self)
        if not isinstance(self.by_stream, bool):
            raise MidusError(f"by_stream of a part={self.by_stream!r} must be true or false")

    def absolute(self, weight_size: float, num_steps: int | None = None) -> "PartOptions":
        """With a rate in the place of a multiple."""
        return _absolute(self, weight_size, num_steps)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW as the paper has it: keys and values at a constant rate of their own."""

    recipe: str = "paper"
    """Rates where none are given: paper, or short for runs of hundreds of steps."""
    lr: float | None = None
    """Largest rate of the schedule; default: the recipe's."""
    relative_lr: float | None = None
    """In place of lr: a multiple of the size of the base's weights, their root mean square."""
    for_steps: int | None = None
    """Steps that relative_lr is for: a run of N has it times (for_steps / N) ** steps_power."""
    steps_power: float | None = None
    """How fast relative_lr falls with the steps of a run; default: 1/3."""
    memory_lr: float | None = None
    """Constant rate of keys and values; default: the recipe's (paper: lr)."""
    weight_decay: float | None = None
    """Weight decay of matrices; keys, values, norms and biases have none."""
    warmup_ratio: float = 0.1
    """Share of the steps in which the rate rises."""
    schedule: str = "cosine"
    """Rate after the warm-up: cosine, linear or constant."""
    decay_ratio: float = 1.0
    """Share of the steps after the warm-up, the last ones, in which the schedule falls."""
    constant_value_proj: bool = False
    """Give the head projections W_h the memory's constant rate instead of the schedule."""
    parts: dict[str, PartOptions] = field(default_factory=dict)
    """Parts apart, of memory blocks attention, keys, values, value_proj, output_proj, bypass; of
    all that trains norms (gains and biases)."""
    adam_beta2: float | None = None
    """Decay of AdamW's second moment; default: the recipe's."""
    matrices: str = "adamw"
    """What steps the matrices of linear layers: adamw (as trainer.optim has it), or muon."""

    def __post_init__(self) -> None:
        """Check the values."""
        _one_of("optimizer.recipe", self.recipe, RECIPES)
        _one_of("optimizer.schedule", self.schedule, SCHEDULES)
        _one_of("optimizer.matrices", self.matrices, MATRICES)
        for name, largest in (("lr", 10), ("memory_lr", 10), ("weight_decay", 10)):
            _number(f"optimizer.{name}", getattr(self, name), 0.0, largest, optional=True)
        for name in ("warmup_ratio", "decay_ratio"):
            _number(f"optimizer.{name}", getattr(self, name), 0.0, 1.0)
        if not isinstance(self.constant_value_proj, bool):
            raise MidusError(
                f"optimizer.constant_value_proj={self.constant_value_proj!r} must be true or false"
            )
        _number("optimizer.adam_beta2", self.adam_beta2, 0.0, 1.0, optional=True)
        _check_relative("optimizer.", self)
        for part in self.parts:
            _one_of("part of optimizer.parts", part, PARTS)
        norms = self.parts.get("norms", PartOptions())
        if norms.relative_lr is not None or norms.by_stream:
            raise MidusError(
                "optimizer.parts.norms takes lr, not relative_lr or by_stream: gains of norms go "
                "neither with the size of matrices nor with the stream"
            )
        if self.constant_value_proj and "value_proj" in self.parts:
            raise MidusError(
                "optimizer.constant_value_proj and optimizer.parts.value_proj exclude each other; "
                "give the part schedule: constant and a rate instead"
            )

    def resolved(self, stage: str) -> "OptimizerOptions":
        """With the recipe's values where none are given."""
        values = {"memory_lr": None, **_RECIPES[self.recipe][stage]}
        chosen = {k: v for k, v in values.items() if getattr(self, k) is None}
        if self.relative_lr is not None:
            del chosen["lr"]
        options = replace(self, **chosen)
        return replace(options, memory_lr=options.lr) if options.memory_lr is None else options

    @property
    def is_relative(self) -> bool:
        """Whether any rate is a multiple of the size of the base's weights."""
        own = [self.relative_lr, *(part.relative_lr for part in self.parts.values())]
        return any(rate is not None for rate in own)

    @property
    def goes_with_steps(self) -> bool:
        """Whether any rate depends on the number of steps."""
        own = [self.for_steps, *(part.for_steps for part in self.parts.values())]
        return any(steps is not None for steps in own)

    @property
    def is_by_stream(self) -> bool:
        """Whether any part's rate goes with the stream before each block."""
        return any(part.by_stream for part in self.parts.values())

    def absolute(self, weight_size: float, num_steps: int | None = None) -> "OptimizerOptions":
        """With rates in the place of multiples of the size of the base's weights.

        Args:
            weight_size: What they are multiples of.
            num_steps: Steps of the run, for rates that go with them; None: as many as they are for.
        """
        made = _absolute(self, weight_size, num_steps)
        return replace(
            made,
            memory_lr=made.lr if self.memory_lr is None else self.memory_lr,
            parts={name: own.absolute(weight_size, num_steps) for name, own in self.parts.items()},
        )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One run of `midus train`."""

    stage: str
    """cpt (continual pre-training on text) or sft (supervised fine-tuning on instructions)."""
    model: str
    """The model to start from, base or grown: folder, hub id, .gguf file or smollm2-135m."""
    output: str
    """Folder of the run: options, checkpoints, metrics, plot, and the model in the end."""
    upscale: UpscaleConfig | None = None
    """How the model grows first; leave it out for a model that has grown or should not."""
    control: str = "none"
    """Train something else with as many parameters instead of growing: lora or last_layers."""
    key_start: str = "random"
    """Keys of the memory blocks: random as they grow, or queries (clusters of the base's own)."""
    trainable: str = "auto"
    """What trains: inserted, all, or auto (cpt: what the method trains; sft: all)."""
    data: DataOptions
    """The text or the instructions."""
    batch_size: int = 64
    """Sequences of one optimizer step, all devices and accumulation steps together."""
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    """Rates, schedule and decay."""
    precision: str = "mixed"
    """mixed (trained weights in float32, arithmetic in bfloat16 on a GPU), pure_bf16, float32."""
    sharding: str = "none"
    """Of several processes: none (each holds the model), or fsdp2 (each holds its share)."""
    load_in_4bit: bool = False
    """Keep the frozen base in 4 bits through bitsandbytes."""
    attention: str | None = None
    """Attention implementation of transformers, such as flash_attention_2; default: its choice."""
    loss_chunk: int = 1024
    """Tokens whose logits are in memory at a time while the loss is computed."""
    fused_blocks: bool = True
    """On a GPU, compute norms, rotary embeddings and gates of Llama-like blocks in our kernels."""
    cuda_graphs: bool = True
    """cpt on one GPU: capture the step of a micro batch once and replay it."""
    max_length: int = 2048
    """sft: longest example in tokens; longer ones are cut."""
    keep_best: bool = False
    """Take the checkpoint with the lowest held-out loss in the end, not the last one."""
    early_stopping_patience: int | None = None
    """Stop after so many evaluations without a lower held-out loss."""
    seed: int = 42
    """Seed of the data order and of whatever else is random in training."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Passed to transformers' TrainingArguments (sft: TRL's SFTConfig) as it is."""

    def __post_init__(self) -> None:
        """Check the values that need no model."""
        _one_of("stage", self.stage, STAGES)
        _one_of("control", self.control, CONTROLS)
        _one_of("trainable", self.trainable, TRAINABLE)
        _one_of("key_start", self.key_start, KEY_STARTS)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("sharding", self.sharding, SHARDINGS)
        for name in ("model", "output"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise MidusError(f"{name}={getattr(self, name)!r} must be a non-empty string")
        for name in ("load_in_4bit", "keep_best", "fused_blocks", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise MidusError(f"{name}={getattr(self, name)!r} must be true or false")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise MidusError(f"seed={self.seed!r} must be a whole number from 0")
        if self.attention is not None and not isinstance(self.attention, str):
            raise MidusError(f"attention={self.attention!r} must be a name such as sdpa")
        for name in ("batch_size", "loss_chunk", "max_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise MidusError(f"{name}={value!r} must be a positive whole number")
        patience = self.early_stopping_patience
        if patience is not None and (type(patience) is not int or patience < 1):
            raise MidusError(
                f"early_stopping_patience={patience!r} must be a positive whole number"
            )
        if self.control != "none" and self.upscale is None:
            raise MidusError(
                f"control={self.control!r} takes as many trainable parameters as the up-scaled "
                "model would have; say how in an upscale section"
            )
        _refuse_owned(self.trainer)
        clipped = [name for name, own in self.optimizer.parts.items() if own.max_grad_norm]
        if clipped and not self.trainer.get("max_grad_norm", 1.0):
            raise MidusError(
                f"optimizer.parts.{clipped[0]}.max_grad_norm has no effect with "
                "trainer.max_grad_norm=0; give trainer.max_grad_norm a number, or leave it out"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainOptions":
        """The options a mapping spells out, or its recipe; unknown and missing keys are errors."""
        options: TrainOptions = build_options(cls, with_recipe(values), "")
        return options

    def to_dict(self) -> dict[str, Any]:
        """Every option, as plain values for YAML or JSON."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


def read_options(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> TrainOptions:
    """The options of a YAML file, with ``a.b=value`` overrides.

    Args:
        path: The file.
        overrides: Each one key with dots and a YAML value; ``data.sources.0.weight=2`` reaches into
            a list.
    """
    values = read_yaml(path, overrides, "stage: cpt")
    try:
        return TrainOptions.from_dict(values)
    except MidusError as error:
        raise MidusError(f"{path}: {error}") from error


def _refuse_owned(trainer: Any) -> None:
    if not isinstance(trainer, dict):
        raise MidusError(f"trainer={trainer!r} must be a mapping of TrainingArguments")
    for name in trainer:
        if not isinstance(name, str):
            raise MidusError(f"trainer.{name} is no argument of the trainer; leave it out")
        if name in _OWNED:
            raise MidusError(f"trainer.{name} is said elsewhere; use {_OWNED[name]} instead")
        try:
            json.dumps(trainer[name])
        except (TypeError, ValueError) as error:
            raise MidusError(
                f"trainer.{name}={trainer[name]!r} is no text, number, list or mapping; put a date "
                "or the like in quotes"
            ) from error


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise MidusError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


def _check_relative(owner: str, options: PartOptions | OptimizerOptions) -> None:
    lr, relative_lr, for_steps = options.lr, options.relative_lr, options.for_steps
    _number(f"{owner}relative_lr", relative_lr, 0.0, 10, optional=True)
    if lr is not None and relative_lr is not None:
        raise MidusError(
            f"{owner}lr={lr} and relative_lr={relative_lr} exclude each other; leave one out"
        )
    _number(f"{owner}steps_power", options.steps_power, 0.0, 1.0, optional=True)
    if for_steps is None and options.steps_power is not None:
        raise MidusError(
            f"{owner}steps_power={options.steps_power} says how a rate falls with the steps of a "
            "run; give for_steps, the steps that relative_lr is for, or leave it out"
        )
    if for_steps is None:
        return
    if not isinstance(for_steps, int) or isinstance(for_steps, bool) or for_steps < 1:
        raise MidusError(f"{owner}for_steps={for_steps!r} must be a whole number of at least 1")
    if relative_lr is None:
        raise MidusError(
            f"{owner}for_steps={for_steps} is what a relative_lr is for; give relative_lr, or "
            "leave it out"
        )


_Rates = TypeVar("_Rates", PartOptions, OptimizerOptions)


def _absolute(options: _Rates, weight_size: float, num_steps: int | None) -> _Rates:
    """With a rate in the place of a multiple, and no steps that it is for."""
    lr, for_steps = options.relative_lr, options.for_steps
    if lr is None:
        return options
    if for_steps is not None and num_steps is not None:
        power = _STEPS_POWER if options.steps_power is None else options.steps_power
        lr *= (for_steps / num_steps) ** power
    return replace(options, lr=lr * weight_size, relative_lr=None, for_steps=None, steps_power=None)


def _number(name: str, value: Any, smallest: float, largest: float, optional: bool = False) -> None:
    if value is None and optional:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not smallest <= value <= largest:
        raise MidusError(f"{name}={value!r} must be a number from {smallest:g} to {largest:g}")


__all__ = ["MemoryConfig", "OptimizerOptions", "TrainOptions", "UpscaleConfig", "read_options"]

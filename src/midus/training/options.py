"""What one training run is: a YAML file, key for key the dataclasses below.

Options of the run are ours; everything else of Hugging Face's trainer passes through untouched
under ``trainer:``. An unknown key is an error, and every run saves the options it resolved.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from midus.config import MemoryConfig, UpscaleConfig
from midus.data.options import DataOptions
from midus.errors import MidusError
from midus.training.optimizer_options import OptimizerOptions, one_of
from midus.training.reading import build_options, read_yaml
from midus.training.recipes import with_recipe

STAGES = ("cpt", "sft")
PRECISIONS = ("mixed", "pure_bf16", "float32", "float64")
TRAINABLE = ("auto", "inserted", "all")
CONTROLS = ("none", "lora", "last_layers")
SHARDINGS = ("none", "fsdp2")
KEY_STARTS = ("random", "queries")
LARGEST_SEED = 2**32 - 1

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


def is_seed(value: Any) -> bool:
    """Whether torch and numpy take it as a seed."""
    return type(value) is int and 0 <= value <= LARGEST_SEED


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
        one_of("stage", self.stage, STAGES)
        one_of("control", self.control, CONTROLS)
        one_of("trainable", self.trainable, TRAINABLE)
        one_of("key_start", self.key_start, KEY_STARTS)
        one_of("precision", self.precision, PRECISIONS)
        one_of("sharding", self.sharding, SHARDINGS)
        for name in ("model", "output"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise MidusError(f"{name}={getattr(self, name)!r} must be a non-empty string")
        for name in ("load_in_4bit", "keep_best", "fused_blocks", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise MidusError(f"{name}={getattr(self, name)!r} must be true or false")
        if self.output.startswith("~"):  # the trainer would expand it for itself alone
            object.__setattr__(self, "output", _expanded(self.output))
        if not is_seed(self.seed):
            raise MidusError(f"seed={self.seed!r} must be a whole number from 0 to {LARGEST_SEED}")
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
        options: TrainOptions = build_options(cls, with_recipe(values), "", ("recipe",))
        return options

    def to_dict(self) -> dict[str, Any]:
        """Every option, as plain values for YAML or JSON."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


def _expanded(path: str) -> str:
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise MidusError(f"output={path!r} names no user's home ({error}); write it out") from error


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


__all__ = ["MemoryConfig", "OptimizerOptions", "TrainOptions", "UpscaleConfig", "read_options"]

"""The optimizer of a run, key for key the dataclasses below: rates, schedules, and parts apart."""

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from midus.errors import MidusError

RECIPES = ("paper", "short")
SCHEDULES = ("cosine", "linear", "constant")
MATRICES = ("adamw", "muon")
PARTS = ("attention", "keys", "values", "value_proj", "output_proj", "bypass", "norms")
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
            one_of("schedule of a part", self.schedule, SCHEDULES)
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
        one_of("optimizer.recipe", self.recipe, RECIPES)
        one_of("optimizer.schedule", self.schedule, SCHEDULES)
        one_of("optimizer.matrices", self.matrices, MATRICES)
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
            one_of("part of optimizer.parts", part, PARTS)
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


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Refuses a value that is not among those known."""
    if value not in known:
        raise MidusError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


def _number(name: str, value: Any, smallest: float, largest: float, optional: bool = False) -> None:
    if value is None and optional:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not smallest <= value <= largest:
        raise MidusError(f"{name}={value!r} must be a number from {smallest:g} to {largest:g}")


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

"""Training grown models: continual pre-training and fine-tuning from one file of options.

`run.train` does a whole run; `optim` is the paper's optimizer on its own, for trainers of yours.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midus.training.optim import constant_memory_schedule, parameter_groups
    from midus.training.optimizer_options import OptimizerOptions
    from midus.training.options import TrainOptions, read_options
    from midus.training.run import TrainResult, train

_HOMES = {
    "OptimizerOptions": "options",
    "TrainOptions": "options",
    "TrainResult": "run",
    "constant_memory_schedule": "optim",
    "parameter_groups": "optim",
    "read_options": "options",
    "train": "run",
}
__all__ = [
    "OptimizerOptions",
    "TrainOptions",
    "TrainResult",
    "constant_memory_schedule",
    "parameter_groups",
    "read_options",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""The paper's optimizer: keys and values at a constant rate of their own, without weight decay.

Paper, Appendix "Hyperparameter Settings": everything else follows a cosine with warm-up. Its rate
for keys and values is the largest of that schedule, which suits 12,100 steps; in short runs a
higher one decides how much a table that starts at zero can learn.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from midus.memory.base import MemoryLayer
from midus.memory.hive import HiveValues

MEMORY_GROUP = "memory"


def parameter_groups(
    model: nn.Module,
    lr: float,
    memory_lr: float | None = None,
    weight_decay: float = 0.0,
    constant_value_proj: bool = False,
) -> list[dict[str, Any]]:
    """Groups of the trainable parameters, for any ``torch.optim`` optimizer.

    Args:
        model: A grown model; what does not train is left out.
        lr: Largest rate of the schedule.
        memory_lr: Constant rate of keys and values. Default: ``lr``, as in the paper.
        weight_decay: Of matrices. Norms, biases, keys and values have none.
        constant_value_proj: Count HIVE's head projections W_h among the values.

    Returns:
        Up to three groups with a ``name``: ``decay``, ``no_decay`` and ``memory``.
    """
    memory = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, MemoryLayer)
        for parameter in module.keys_and_values()
    }
    if constant_value_proj:
        memory |= {id(m.value_proj) for m in model.modules() if isinstance(m, HiveValues)}
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], MEMORY_GROUP: []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in memory:
            groups[MEMORY_GROUP].append(parameter)
        else:
            groups["decay" if parameter.ndim > 1 else "no_decay"].append(parameter)
    rates = {MEMORY_GROUP: lr if memory_lr is None else memory_lr}
    decays = {"decay": weight_decay}
    return [
        {
            "name": name,
            "params": parameters,
            "lr": rates.get(name, lr),
            "weight_decay": decays.get(name, 0.0),
        }
        for name, parameters in groups.items()
        if parameters
    ]


def constant_memory_schedule(
    optimizer: Optimizer, num_steps: int, warmup_ratio: float = 0.1, shape: str = "cosine"
) -> LambdaLR:
    """Warm-up, then ``shape``; the memory group keeps its rate from first to last.

    Args:
        optimizer: Made from ``parameter_groups``.
        num_steps: Steps of the whole run.
        warmup_ratio: Share of the steps in which the rate rises.
        shape: ``cosine`` or ``linear``, both down to zero, or ``constant``.
    """
    num_warmup = math.ceil(num_steps * warmup_ratio)

    def scheduled(step: int) -> float:
        if step < num_warmup:
            return step / max(num_warmup, 1)
        progress = min((step - num_warmup) / max(num_steps - num_warmup, 1), 1.0)
        return _SHAPES[shape](progress)

    def constant(step: int) -> float:
        return 1.0

    is_memory = [group.get("name") == MEMORY_GROUP for group in optimizer.param_groups]
    return LambdaLR(optimizer, [constant if memory else scheduled for memory in is_memory])


_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}

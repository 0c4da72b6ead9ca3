"""The paper's optimizer: keys and values at a constant rate of their own, without weight decay.

Paper, Appendix "Hyperparameter Settings": everything else follows a cosine with warm-up. Its rate
for keys and values is the largest of that schedule, which suits 12,100 steps; in short runs a
higher one decides how much a table that starts at zero can learn. Beyond the paper, each part of
the memory blocks, and norms, can have a rate, schedule, decay and clipping of its own
(`PartOptions`).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from midus.memory.base import MemoryLayer
from midus.memory.hive import HiveValues
from midus.models.block import MemoryBlock
from midus.training.muon import MuonBeside, split_for_muon
from midus.training.optimizer_options import OptimizerOptions, PartOptions

MEMORY_GROUP = "memory"
# Groups of keys and values, which the paper trains at a constant rate.
_CONSTANT = (MEMORY_GROUP, "keys", "values")
_KEYS = ("row_keys", "col_keys", "keys")


def part_of(name: str) -> str | None:
    """The part of a memory block that a matrix of it belongs to, by its name inside the block."""
    leaf = name.rpartition(".")[2]
    if name.startswith("self_attn."):
        return "attention"
    if name.startswith("memory_output_proj."):
        return "output_proj"
    if name.startswith("bypass."):
        return "bypass"
    if leaf in _KEYS:
        return "keys"
    if leaf in ("latent_values", "values"):
        return "values"
    return "value_proj" if leaf == "value_proj" else None


def find_parts(model: nn.Module) -> dict[int, str]:
    """The part of every parameter that has one, by the parameter's ``id``.

    Matrices have one in memory blocks alone, gains and biases everywhere.
    """
    parts = {id(parameter): "norms" for parameter in model.parameters() if parameter.ndim < 2}
    for block in model.modules():
        if isinstance(block, MemoryBlock):
            for name, parameter in block.named_parameters():
                if parameter.ndim > 1 and (part := part_of(name)):
                    parts[id(parameter)] = part
    return parts


def parameter_groups(
    model: nn.Module,
    lr: float,
    memory_lr: float | None = None,
    weight_decay: float = 0.0,
    constant_value_proj: bool = False,
    parts: Mapping[str, PartOptions] | None = None,
    streams: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Groups of the trainable parameters, for any ``torch.optim`` optimizer.

    Args:
        model: A grown model; what does not train is left out.
        lr: Largest rate of the schedule.
        memory_lr: Constant rate of keys and values. Default: ``lr``, as in the paper.
        weight_decay: Of matrices. Norms, biases, keys and values have none.
        constant_value_proj: Count HIVE's head projections W_h among the values.
        parts: Parts that get a group of their own, by name.
        streams: Size of the stream before each memory block, for parts whose rates go with it;
            without it all blocks have the rate that is given.

    Returns:
        Up to three groups with a ``name``, ``decay``, ``no_decay`` and ``memory``, and one for
        each of ``parts`` that the model has, or one for each memory block, which ``block`` counts.
    """
    parts = parts or {}
    part_names = find_parts(model)
    memory = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, MemoryLayer)
        for parameter in module.keys_and_values()
    }
    if constant_value_proj:
        memory |= {id(m.value_proj) for m in model.modules() if isinstance(m, HiveValues)}
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], MEMORY_GROUP: []}
    groups |= {name: [] for name in parts}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        part = part_names.get(id(parameter), "")
        if part in parts:
            groups[part].append(parameter)
        elif id(parameter) in memory:
            groups[MEMORY_GROUP].append(parameter)
        else:
            groups["decay" if parameter.ndim > 1 else "no_decay"].append(parameter)
    slow = lr if memory_lr is None else memory_lr
    made = []
    for name, parameters in groups.items():
        own = parts.get(name, PartOptions())
        is_memory = name in _CONSTANT
        decays = name not in ("no_decay", "norms") and not is_memory
        usual = {"lr": slow if is_memory else lr, "weight_decay": weight_decay if decays else 0.0}
        given = {key: getattr(own, key) for key in usual if getattr(own, key) is not None}
        if not parameters:
            continue
        group = {"name": name, "params": parameters, **usual, **given}
        made += _by_block(group, model, streams) if own.by_stream and streams else [group]
    return made


def make_optimizer(
    model: nn.Module,
    options: OptimizerOptions,
    kind: tuple[Callable[..., Optimizer], Mapping[str, Any]],
    streams: Sequence[float] | None = None,
) -> Optimizer:
    """The optimizer of a run on its groups.

    Args:
        model: The model that trains.
        options: Resolved, with no rate that is relative.
        kind: Class and arguments of an optimizer, as the trainer gives them by ``trainer.optim``.
        streams: Size of the stream before each memory block, where a part's rate goes with it.
    """
    groups = groups_of(model, options, streams)
    make, arguments = kind
    arguments = {name: value for name, value in arguments.items() if name != "lr"}
    if options.matrices == "muon":
        return MuonBeside(groups, lambda own: make(own, **arguments))
    return make(groups, **arguments)


def groups_of(
    model: nn.Module, options: OptimizerOptions, streams: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """See `parameter_groups`; by the options of a run, with matrices apart for Muon."""
    groups = parameter_groups(
        model,
        lr=options.lr or 0.0,
        memory_lr=options.memory_lr,
        weight_decay=options.weight_decay or 0.0,
        constant_value_proj=options.constant_value_proj,
        parts=options.parts,
        streams=streams,
    )
    return split_for_muon(groups, model, _CONSTANT) if options.matrices == "muon" else groups


def group_name(group: Mapping[str, Any]) -> str:
    """A name that no other group of the optimizer has."""
    return f"{group['name']}/{group['block']}" if "block" in group else str(group["name"])


def _by_block(
    group: dict[str, Any], model: nn.Module, streams: Sequence[float]
) -> list[dict[str, Any]]:
    """A group for each memory block, at rates that go with the stream it writes into."""
    blocks = [module for module in model.modules() if isinstance(module, MemoryBlock)]
    mean = statistics.geometric_mean(streams)
    trained = {id(parameter) for parameter in group["params"]}
    return [
        {
            **group,
            "block": number,
            "params": [p for p in block.parameters() if id(p) in trained],
            "lr": group["lr"] * stream / mean,
        }
        for number, (block, stream) in enumerate(zip(blocks, streams, strict=True))
    ]


def is_relative(name: str, options: OptimizerOptions) -> bool:
    """Whether a group's rate is a multiple of the size of the base's weights, by its name."""
    own = options.parts.get(name, PartOptions())
    if own.lr is not None or own.relative_lr is not None:
        return own.relative_lr is not None
    if name in _CONSTANT and options.memory_lr is not None:
        return False
    return options.relative_lr is not None


def schedule_of(
    name: str,
    warmup_ratio: float,
    shape: str,
    parts: Mapping[str, PartOptions] | None = None,
) -> tuple[str, float]:
    """Shape and share of warm-up of a group, by its name."""
    own = (parts or {}).get(name, PartOptions())
    usual = ("constant", 0.0) if name in _CONSTANT else (shape, warmup_ratio)
    return (
        usual[0] if own.schedule is None else own.schedule,
        usual[1] if own.warmup_ratio is None else own.warmup_ratio,
    )


def constant_memory_schedule(
    optimizer: Optimizer,
    num_steps: int,
    warmup_ratio: float = 0.1,
    shape: str = "cosine",
    decay_ratio: float = 1.0,
    parts: Mapping[str, PartOptions] | None = None,
) -> LambdaLR:
    """Warm-up, then ``shape``; the memory group keeps its rate from first to last.

    Args:
        optimizer: Made from ``parameter_groups``.
        num_steps: Steps of the whole run.
        warmup_ratio: Share of the steps in which the rate rises.
        shape: ``cosine`` or ``linear``, both down to zero, or ``constant``.
        decay_ratio: Share of the steps after the warm-up, the last ones, in which the shape falls.
        parts: Parts with a schedule of their own, as the groups have them.
    """

    def scheduled(name: str) -> Callable[[int], float]:
        own_shape, own_warmup = schedule_of(name, warmup_ratio, shape, parts)
        num_warmup = math.ceil(num_steps * own_warmup)
        own = (parts or {}).get(name, PartOptions())
        own_share = decay_ratio if own.decay_ratio is None else own.decay_ratio
        num_falling = (num_steps - num_warmup) * own_share

        def rate(step: int) -> float:
            if step < num_warmup:
                return step / num_warmup
            fallen = step - (num_steps - num_falling)
            return _SHAPES[own_shape](min(max(fallen / max(num_falling, 1), 0.0), 1.0))

        return rate

    return LambdaLR(
        optimizer, [scheduled(group.get("name", "")) for group in optimizer.param_groups]
    )


_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def make_clipping(
    model: nn.Module, max_norm: float, parts: Mapping[str, PartOptions] | None = None
) -> Callable[[], Tensor]:
    """Clips the gradients when called, and gives the norm that all of them had before.

    Args:
        model: The model that trains.
        max_norm: Largest norm of the gradients together; 0: they are not clipped.
        parts: Parts by name; one with ``max_grad_norm`` is clipped at it, alone.
    """
    limits = {
        name: own.max_grad_norm
        for name, own in (parts or {}).items()
        if own.max_grad_norm is not None
    }
    names = find_parts(model) if limits else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rest = [parameter for parameter in trained if names.get(id(parameter)) not in limits]
    bounded = [(rest, max_norm)]
    for name, limit in limits.items():
        bounded.append(([p for p in trained if names.get(id(p)) == name], limit))

    def clip() -> Tensor:
        norms = [_clip(parameters, limit) for parameters, limit in bounded if parameters]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    return clip


def _clip(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, limit or math.inf)

"""What an up-scaling method is: a plan of the new stack, and the tensors new blocks start with."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from midus.config import UpscaleConfig
from midus.upscaling.plan import StackPlan

Track = Callable[[Iterable[Any], str], Iterable[Any]]


class BaseBlocks:
    """The base's blocks, read tensor by tensor from files or from a loaded model.

    Args:
        names: For each block, the full name of a tensor by its name inside the block.
        read: Gives a tensor by its full name.
    """

    def __init__(self, names: list[dict[str, str]], read: Callable[[str], Tensor]) -> None:
        self._names = names
        self._read = read

    def __len__(self) -> int:
        return len(self._names)

    def names(self, layer: int) -> list[str]:
        """Names of a block's tensors inside the block."""
        return list(self._names[layer])

    def read(self, layer: int, name: str) -> Tensor:
        """One tensor of a block."""
        return self._read(self._names[layer][name])

    def read_block(self, layer: int) -> dict[str, Tensor]:
        """Every tensor of a block."""
        return {name: self.read(layer, name) for name in self._names[layer]}


@dataclass(frozen=True)
class Growth:
    """Everything a method needs to make the new blocks."""

    base: BaseBlocks
    plan: StackPlan
    config: Any
    """Config of the grown model."""
    options: UpscaleConfig
    dtype: torch.dtype
    """Type of the new tensors."""
    track: Track
    """Wraps a loop in a progress bar."""

    def inserted(self) -> list[tuple[int, int]]:
        """Final position and anchor of each new block."""
        return list(zip(self.plan.positions, self.plan.anchors, strict=True))


@dataclass(frozen=True)
class Method:
    """One method, as `midus methods` lists it."""

    name: str
    summary: str
    paper: str
    inserts: Literal["memory", "copy", "nothing"]
    preserves_function: bool
    """Whether the grown model starts out computing exactly what the base computes."""
    trains: Literal["inserted", "all"]
    default_placement: str | None
    """The method's own placement; None where its stack is not made by placing blocks."""
    make_plan: Callable[[UpscaleConfig, int], StackPlan]
    make_blocks: Callable[[Growth], Iterator[tuple[int, Mapping[str, Tensor]]]]
    """Yields each new block's final position and its tensors by their names inside the block."""

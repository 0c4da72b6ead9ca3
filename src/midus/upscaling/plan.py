"""The new stack as data, decided and printed before anything is built."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from midus.upscaling.placement import Side, positions_of

Kind = Literal["base", "memory", "copy"]


@dataclass(frozen=True)
class PlannedBlock:
    """One block of the final stack."""

    kind: Kind
    source: int
    """Base index: the block itself, or the anchor an inserted block starts from."""


@dataclass(frozen=True)
class StackPlan:
    """The final stack, first block first."""

    blocks: tuple[PlannedBlock, ...]

    @classmethod
    def interleave(
        cls, num_base_layers: int, anchors: Sequence[int], side: Side, kind: Kind
    ) -> "StackPlan":
        """Every base block in order, with inserted blocks before or after their anchors."""
        inserted = dict(zip(positions_of(anchors, side), anchors, strict=True))
        base = iter(range(num_base_layers))
        return cls(
            tuple(
                PlannedBlock(kind, inserted[i])
                if i in inserted
                else PlannedBlock("base", next(base))
                for i in range(num_base_layers + len(inserted))
            )
        )

    @property
    def positions(self) -> list[int]:
        """Final indices of the inserted blocks."""
        return [i for i, block in enumerate(self.blocks) if block.kind != "base"]

    @property
    def anchors(self) -> list[int]:
        """Base indices the inserted blocks start from, in order."""
        return [block.source for block in self.blocks if block.kind != "base"]

    @property
    def sources(self) -> list[int]:
        """For each final index, the base block it is or starts from."""
        return [block.source for block in self.blocks]

    def __str__(self) -> str:
        return "\n".join(
            f"{i:3}  {block.kind:<6} {block.source}" for i, block in enumerate(self.blocks)
        )

"""Avg-DeUS (Cao et al., 2025): a new block is the mean of its two neighbours, norms included."""

from collections.abc import Iterator

from torch import Tensor

from midus.config import UpscaleConfig
from midus.upscaling.copying import interleave_copies
from midus.upscaling.method import Growth, Method
from midus.upscaling.plan import StackPlan

_PLACEMENT = "top_heavy"


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """A new block before every anchor, between it and the block before it."""
    return interleave_copies(config, num_base_layers, _PLACEMENT, "before", needs_left=True)


def make_blocks(growth: Growth) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Every tensor is the mean of the neighbours', taken in float32."""
    for position, anchor in growth.track(growth.inserted(), "averaging blocks"):
        yield (
            position,
            {
                name: mean(growth.base.read(anchor - 1, name), growth.base.read(anchor, name)).to(
                    growth.dtype
                )
                for name in growth.base.names(anchor)
            },
        )


def mean(first: Tensor, second: Tensor) -> Tensor:
    """The mean of two tensors in float32."""
    return (first.float() + second.float()) / 2


METHOD = Method(
    name="avg_deus",
    summary="the mean of the two neighbouring blocks",
    paper="Cao et al., 2025",
    inserts="copy",
    preserves_function=False,
    trains="inserted",
    default_placement=_PLACEMENT,
    make_plan=make_plan,
    make_blocks=make_blocks,
)

"""The base as it is: the control every comparison needs. Everything trains."""

from collections.abc import Iterator

from torch import Tensor

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.upscaling.method import Growth, Method
from midus.upscaling.plan import PlannedBlock, StackPlan


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """The base's own blocks."""
    if config.num_inserted or config.positions or config.placement:
        raise MidusError("method 'base' inserts nothing; leave out number, placement and positions")
    return StackPlan(tuple(PlannedBlock("base", i) for i in range(num_base_layers)))


def make_blocks(growth: Growth) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """None."""
    return iter(())


METHOD = Method(
    name="base",
    summary="the base unchanged",
    paper="the control",
    inserts="nothing",
    preserves_function=True,
    trains="all",
    default_placement=None,
    make_plan=make_plan,
    make_blocks=make_blocks,
)

"""SOLAR (Kim et al., 2023): the lower part of the base, then its upper part, overlapping.

Depth S takes blocks [0, ceil(S/2)) and then [L - floor(S/2), L): for 32 -> 48, [0, 24) and [8, 32).
"""

from midus.config import UpscaleConfig
from midus.upscaling.copying import copy_blocks, stack_sources
from midus.upscaling.method import Method
from midus.upscaling.plan import StackPlan


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """Two overlapping ranges; the overlap's second copy is the inserted one."""

    def sources(depth: int) -> list[int]:
        lower, upper = (depth + 1) // 2, depth // 2
        return [*range(lower), *range(num_base_layers - upper, num_base_layers)]

    return stack_sources(config, num_base_layers, sources)


METHOD = Method(
    name="solar",
    summary="two overlapping ranges of the base, one on the other",
    paper="Kim et al., 2023",
    inserts="copy",
    preserves_function=False,
    trains="all",
    default_placement=None,
    make_plan=make_plan,
    make_blocks=copy_blocks,
)

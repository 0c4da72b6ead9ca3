"""Stacking (Gong et al., 2019; Du et al., 2024): the base on itself, cut at the depth asked for."""

from midus.config import UpscaleConfig
from midus.upscaling.copying import copy_blocks, stack_sources
from midus.upscaling.method import Method
from midus.upscaling.plan import StackPlan


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """[0, L) repeated."""

    def sources(depth: int) -> list[int]:
        return [i % num_base_layers for i in range(depth)]

    return stack_sources(config, num_base_layers, sources, at_most_twice=False)


METHOD = Method(
    name="stack",
    summary="the base on itself, cut at the final depth",
    paper="Gong et al., 2019; Du et al., 2024",
    inserts="copy",
    preserves_function=False,
    trains="all",
    default_placement=None,
    make_plan=make_plan,
    make_blocks=copy_blocks,
)

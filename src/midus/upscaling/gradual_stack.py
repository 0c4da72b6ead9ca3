"""Gradual stacking (Saunshi et al., 2024): the last D blocks again on top of the base."""

from midus.config import UpscaleConfig
from midus.upscaling.copying import copy_blocks, stack_sources
from midus.upscaling.method import Method
from midus.upscaling.plan import StackPlan


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """[0, L) and then [L - D, L)."""

    def sources(depth: int) -> list[int]:
        return [*range(num_base_layers), *range(2 * num_base_layers - depth, num_base_layers)]

    return stack_sources(config, num_base_layers, sources)


METHOD = Method(
    name="gradual_stack",
    summary="the last blocks of the base again on top",
    paper="Saunshi et al., 2024",
    inserts="copy",
    preserves_function=False,
    trains="all",
    default_placement=None,
    make_plan=make_plan,
    make_blocks=copy_blocks,
)

"""Llama Pro (Wu et al., 2024): copies after their anchors that start as the identity.

A copy's `o_proj` and `down_proj` are zero, biases included, so it adds nothing to the residual
stream before it is trained.
"""

from collections.abc import Iterator

from torch import Tensor

from midus.config import UpscaleConfig
from midus.upscaling.copying import copy_blocks, interleave_copies, silence
from midus.upscaling.method import Growth, Method
from midus.upscaling.plan import StackPlan

_PLACEMENT = "llama_pro"


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """A copy after every anchor."""
    return interleave_copies(config, num_base_layers, _PLACEMENT, "after", needs_left=False)


def make_blocks(growth: Growth) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Copies with silent outputs."""
    return ((position, silence(block)) for position, block in copy_blocks(growth))


METHOD = Method(
    name="llama_pro",
    summary="copies after their anchors, started as the identity",
    paper="Wu et al., 2024",
    inserts="copy",
    preserves_function=True,
    trains="inserted",
    default_placement=_PLACEMENT,
    make_plan=make_plan,
    make_blocks=make_blocks,
)

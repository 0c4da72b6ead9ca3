"""What the copied-block methods share: plans of copies, plain copies, silent blocks."""

from collections.abc import Callable, Iterator

from torch import Tensor

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.upscaling.method import Growth
from midus.upscaling.placement import Side, choose_anchors
from midus.upscaling.plan import PlannedBlock, StackPlan

# The two projections a block adds to the residual stream through; zero, the block is the identity.
_OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")


def interleave_copies(
    config: UpscaleConfig, num_base_layers: int, placement: str, side: Side, needs_left: bool
) -> StackPlan:
    """Copies before or after their anchors.

    Args:
        config: The user's placement, positions and number of blocks.
        num_base_layers: Blocks of the base.
        placement: The method's own placement.
        side: Whether a copy stands before or after its anchor.
        needs_left: Whether the method mixes the anchor with the block before it.
    """
    anchors = choose_anchors(config, num_base_layers, placement, side)
    if needs_left and 0 in anchors:
        raise MidusError(
            f"method {config.method!r} makes a block from its two neighbours, and the first base "
            f"block has none before it; insert at most {num_base_layers - 1} blocks and none at "
            "position 0"
        )
    return StackPlan.interleave(num_base_layers, anchors, side, "copy")


def stack_sources(
    config: UpscaleConfig,
    num_base_layers: int,
    sources: Callable[[int], list[int]],
    at_most_twice: bool = True,
) -> StackPlan:
    """A stack given as base indices; a block's second appearance is the inserted one.

    Args:
        config: The user's number of blocks.
        num_base_layers: Blocks of the base.
        sources: Base indices of the final stack for a final depth.
        at_most_twice: Whether the method uses each block at most twice.
    """
    if config.placement is not None or config.positions is not None:
        raise MidusError(
            f"method {config.method!r} stacks whole ranges of blocks, so it takes no placement and "
            "no positions; leave them out"
        )
    num_inserted = config.num_inserted or max(num_base_layers // 2, 1)
    if at_most_twice and num_inserted > num_base_layers:
        raise MidusError(
            f"num_inserted={num_inserted} is out of range for a base of {num_base_layers} blocks; "
            f"choose 1 to {num_base_layers}"
        )
    seen: set[int] = set()
    blocks = []
    for source in sources(num_base_layers + num_inserted):
        blocks.append(PlannedBlock("copy" if source in seen else "base", source))
        seen.add(source)
    return StackPlan(tuple(blocks))


def copy_blocks(growth: Growth) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Each new block is its anchor, tensor by tensor."""
    for position, anchor in growth.track(growth.inserted(), "copying blocks"):
        block = growth.base.read_block(anchor)
        yield position, {name: tensor.to(growth.dtype).clone() for name, tensor in block.items()}


def silence(block: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zeroes a block's output projections, weights and biases: the block becomes the identity."""
    return {
        name: tensor.zero_() if name.startswith(_OUTPUTS) else tensor
        for name, tensor in block.items()
    }

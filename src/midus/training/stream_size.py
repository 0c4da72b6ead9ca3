"""How large the residual stream is where a block stands: what it writes is added to that.

A step of Adam is as large as the rate wherever a block stands, and the stream grows from block to
block, in SmolLM2-135M 17 times from its second block to its last.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from midus.errors import MidusError
from midus.models.block import MemoryBlock
from midus.training.listening import read_tokens

FIRST = 5
"""Tokens of a sequence that have next to no context, and often a stream of their own."""


def streams_of_memory(model: Any, batches: Iterable[Tensor]) -> list[float]:
    """Sizes of the stream before each memory block, in their order.

    Args:
        model: A grown model.
        batches: Token ids ``[B, T]``.
    """
    blocks = [module for module in model.modules() if isinstance(module, MemoryBlock)]
    if not blocks:
        raise MidusError(
            "by_stream in optimizer.parts needs memory blocks, and this model has none; leave it "
            "out"
        )
    return stream_sizes(model, blocks, batches)


def stream_sizes(model: Any, blocks: Sequence[nn.Module], batches: Iterable[Tensor]) -> list[float]:
    """Median over tokens of the root mean square of the stream before each of its blocks.

    Args:
        model: A causal language model.
        blocks: Some of its blocks.
        batches: Token ids ``[B, T]``; of sequences that are long enough the first tokens are left
            out.
    """
    found: list[list[Tensor]] = [[] for _ in blocks]

    def keep(index: int, stream: Tensor) -> None:
        begin = FIRST if stream.shape[1] > 2 * FIRST else 0
        found[index].append(stream[:, begin:].float().square().mean(-1).sqrt().flatten())

    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: keep(index, (*args, *kwargs.values())[0]),
            with_kwargs=True,
        )
        for index, block in enumerate(blocks)
    ]
    read_tokens(model, hooks, batches)
    return [torch.cat(sizes).median().item() for sizes in found]

"""What an up-scaled model is to vLLM: its Transformers backend, with memory blocks in the stack.

vLLM builds our decoder by its Auto class, puts its own projections, norms and paged attention in
place of the family's, and counts `config.num_hidden_layers`, the final depth, for its KV cache. The
attention of a memory block goes through the same interface as its neighbours'; only its output
projection is none (Attn', Section 4.2), which vLLM has to be told. Imported by vLLM alone.
"""

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.models.transformers import TransformersForCausalLM

from midus.models.block import MemoryBlock
from midus.serving.delta_weights import whole_weights


class MidusTransformersForCausalLM(TransformersForCausalLM):  # type: ignore[misc]  # vLLM: untyped
    """The Transformers backend for every ``Midus<Family>ForCausalLM``."""

    def recursive_replace(self) -> None:
        """As the backend does, with the attentions of memory blocks told apart first."""
        for block in self.model.modules():
            if isinstance(block, MemoryBlock):
                _prepare_attention(block.self_attn)
        super().recursive_replace()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As the backend does; a delta's tensors are followed by those of its base."""
        if self.config.is_delta:
            weights = whole_weights(weights, self.config)
        loaded: set[str] = super().load_weights(weights)
        return loaded


def _prepare_attention(attention: nn.Module) -> None:
    """Gives Attn' a class of its own, and lets it return all heads where they are shared out.

    vLLM looks at one module of a class to rewrite all of them, and would look for the output
    projection that the family's own attention has.
    """
    if not isinstance(attention.o_proj, nn.Identity):
        return
    attention_class: Any = type(attention)
    attention.__class__ = _head_attention_class(attention_class)
    # A registered part in either case: vLLM traces what the forward pass calls.
    is_shared = get_tensor_model_parallel_world_size() > 1
    attention.o_proj = _AllHeads() if is_shared else nn.Identity()


@functools.cache
def _head_attention_class(attention_class: Any) -> Any:
    return type(f"Head{attention_class.__name__}", (attention_class,), {})


class _AllHeads(nn.Module):
    """The head outputs of all ranks side by side; every rank holds the whole memory."""

    def forward(self, head_outputs: Tensor) -> Tensor:
        gathered: Tensor = tensor_model_parallel_all_gather(head_outputs)
        return gathered

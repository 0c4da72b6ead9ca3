"""Midus<Family>Model and Midus<Family>ForCausalLM: the family's own classes with memory blocks.

Only the list of blocks differs from the family's model, so its forward, caches, masks, loss and
generation run unchanged.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from midus.memory import MemoryModule
from midus.memory.hive import HiveValues
from midus.models.block import MemoryBlock
from midus.models.configuration import CONFIG_CLASSES
from midus.models.families import FAMILIES, Family, find_family
from midus.models.fast import generate_fast
from midus.models.pretrained import CheckpointMixin
from midus.models.switch import MemorySwitch, guard_cache


class MidusPreTrainedMixin(MemorySwitch, CheckpointMixin):
    """What decoder and causal LM have in common."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MemoryModule):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]  # the family's class

    def build_value_cache(self) -> None:
        """Projects every HIVE table for each head, for inference; see `memory/hive.py`.

        The caches take ``num_heads * num_slots * head_width`` numbers a block and are dropped by
        ``train()`` and by a change of the weights. Called again, it makes them anew, for changes
        that PyTorch does not count (those through ``.data``).
        """
        for values in self._hive_values():
            values.build_cache()

    def drop_value_cache(self) -> None:
        """Frees what ``build_value_cache`` made."""
        for values in self._hive_values():
            values.drop_cache()

    def _hive_values(self) -> list[HiveValues]:
        return [m for m in self.modules() if isinstance(m, HiveValues)]  # type: ignore[attr-defined]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: checkpoints carry a stub that imports midus, never a copy of its source."""


class MidusModelMixin(MidusPreTrainedMixin):
    """The decoder: base blocks and memory blocks in one list."""

    def __init__(self, config: Any) -> None:
        # The family builds everything but its blocks, which are built once, below.
        depth, config.num_hidden_layers = config.num_hidden_layers, 0
        try:
            super().__init__(config)  # type: ignore[call-arg]  # the family's class
        finally:
            config.num_hidden_layers = depth
        block_class = find_family(config.model_type).block_class
        memory_positions = set(config.memory_positions)
        self.layers = nn.ModuleList(
            (MemoryBlock if layer_idx in memory_positions else block_class)(config, layer_idx)
            for layer_idx in range(depth)
        )
        self.post_init()

    def post_init(self) -> None:
        # The family's __init__ ends with this call while it has no blocks; wait for them.
        if len(self.layers) > 0:
            super().post_init()  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # nn.Module's
        # Of a copy made inside `memory_disabled`, nobody would end the state.
        self._disabled = ()
        self._apply_gates()

    def _memory_blocks(self) -> dict[int, MemoryBlock]:
        """By position. Wrappers (FSDP, say) may stand around them."""
        blocks = [module for module in self.layers.modules() if isinstance(module, MemoryBlock)]
        return {cast("int", block.self_attn.layer_idx): block for block in blocks}


class MidusForCausalLMMixin(MidusPreTrainedMixin):
    """The causal LM: the decoder above and the family's head."""

    decoder_class: Any

    def __init__(self, config: Any) -> None:
        # Not the family's __init__: it would build the family's decoder first.
        PreTrainedModel.__init__(self, config)  # type: ignore[arg-type]  # a mixin of it
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]  # PreTrainedModel's

    def generate(self, *args: Any, fast: bool = False, **kwargs: Any) -> Any:
        """As ``GenerationMixin.generate``; on a CUDA device with value caches while it lasts.

        ``fast=True`` decodes by CUDA graphs, see `generate_fast`.
        """
        if fast:
            return generate_fast(self, *args, **kwargs)
        generate = super().generate  # type: ignore[misc]  # GenerationMixin's
        missing = [
            values
            for block in self.model._memory_blocks().values()
            if block.gate != 0.0
            for values in block.modules()
            if isinstance(values, HiveValues) and values.fresh_cache() is None
        ]
        is_training = self.training  # type: ignore[attr-defined]  # nn.Module's
        if is_training or not (missing and self._caches_fit()):
            return generate(*args, **kwargs)
        try:
            for values in missing:
                values.build_cache()
            return generate(*args, **kwargs)
        finally:
            for values in missing:
                values.drop_cache()

    def _caches_fit(self) -> bool:
        """Whether value caches would take less than half of what a CUDA device has free."""
        device = self.device  # type: ignore[attr-defined]
        if device.type != "cuda":
            return False
        sizes = [
            values.latent_values.shape[0]
            * values.value_proj[:, 0].numel()
            * values.value_proj.itemsize
            for values in self._hive_values()
        ]
        return sum(sizes) < torch.cuda.mem_get_info(device)[0] / 2


def _make_model_classes(family: Family) -> tuple[Any, Any]:
    config_class = CONFIG_CLASSES[family.model_type]
    shared = {
        "__module__": __name__,
        "__annotations__": {"config": config_class},
        "config_class": config_class,
        "_no_split_modules": [family.block_class.__name__, MemoryBlock.__name__],
        "_can_record_outputs": {
            "hidden_states": [family.block_class, MemoryBlock],
            "attentions": [family.attention_class],
        },
    }
    decoder = type(
        f"Midus{family.text_prefix or family.prefix}Model",
        (MidusModelMixin, family.model_class),
        {
            **shared,
            "__doc__": f"{family.model_class.__name__} with memory blocks.",
            "forward": guard_cache(family.model_class.forward),
        },
    )
    causal_lm = type(
        f"Midus{family.prefix}ForCausalLM",
        (MidusForCausalLMMixin, family.causal_lm_class, GenerationMixin),
        {
            **shared,
            "__doc__": f"{family.causal_lm_class.__name__} with memory blocks.",
            "decoder_class": decoder,
        },
    )
    return decoder, causal_lm


MODEL_CLASSES: dict[str, Any] = {}
CAUSAL_LM_CLASSES: dict[str, Any] = {}
for _model_type, _family in FAMILIES.items():
    MODEL_CLASSES[_model_type], CAUSAL_LM_CLASSES[_model_type] = _make_model_classes(_family)
globals().update(
    {cls.__name__: cls for cls in (*MODEL_CLASSES.values(), *CAUSAL_LM_CLASSES.values())}
)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What Hugging Face loads and saves; importing this package registers it with the Auto classes."""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from midus.models import configuration, modeling
from midus.models.block import MemoryBlock
from midus.models.configuration import CONFIG_CLASSES
from midus.models.families import FAMILIES
from midus.models.modeling import CAUSAL_LM_CLASSES, MODEL_CLASSES


def _register() -> None:
    for model_type, family in FAMILIES.items():
        config_class = CONFIG_CLASSES[model_type]
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, MODEL_CLASSES[model_type], exist_ok=True)
        AutoModelForCausalLM.register(config_class, CAUSAL_LM_CLASSES[model_type], exist_ok=True)
        tokenizer = TOKENIZER_MAPPING.get(family.config_class, None)
        if tokenizer is not None:
            TOKENIZER_MAPPING.register(config_class, tokenizer, exist_ok=True)


_register()


def __getattr__(name: str) -> Any:
    """The classes made for each family, such as ``MidusLlamaForCausalLM``."""
    for module in (configuration, modeling):
        if name.startswith("Midus") and name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["CAUSAL_LM_CLASSES", "CONFIG_CLASSES", "FAMILIES", "MODEL_CLASSES", "MemoryBlock"]

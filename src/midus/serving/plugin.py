"""vLLM's plugin: every up-scaled class is known to vLLM wherever midus is installed beside it.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. Models of
copied blocks (SOLAR, Llama Pro, ...) are plain models of their family and need none of this.
"""

# By name: vLLM imports it where a model is made, and not before it has chosen a device.
MODEL = "midus.serving.vllm_model:MidusTransformersForCausalLM"


def register() -> None:
    """Tells vLLM and the Auto classes about every family's up-scaled class; twice does no harm."""
    from vllm import ModelRegistry

    from midus.models import CAUSAL_LM_CLASSES

    for model_class in CAUSAL_LM_CLASSES.values():
        ModelRegistry.register_model(model_class.__name__, MODEL)

"""Whether stored tensors are the ones a config describes, before anything is made of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from midus.errors import MidusError
from midus.models.checkpoint import full_name
from midus.models.families import find_family, is_upscaled
from midus.models.fingerprint import is_base_tensor
from midus.models.modeling import CAUSAL_LM_CLASSES


def causal_lm_class(config: Any) -> Any:
    """The class of a base's or a grown model's config."""
    family = find_family(config.model_type)
    upscaled = is_upscaled(config.model_type)
    return CAUSAL_LM_CLASSES[family.model_type] if upscaled else family.causal_lm_class


def make_meta_model(config: Any) -> Any:
    """The causal LM of a config, without memory for its weights."""
    with torch.device("meta"):
        return causal_lm_class(config)(config)


def refuse_misfit(shapes: Mapping[str, tuple[int, ...]], config: Any, source: str | Path) -> None:
    """Refuses weights that lack a tensor of the model or have one of another shape.

    Args:
        shapes: Shape by tensor name.
        config: Config of the model they should make up.
        source: What to call them in the message.
    """
    stored = {full_name(name): shape for name, shape in shapes.items()}
    for name, tensor in make_meta_model(config).state_dict().items():
        if name not in stored:
            if is_base_tensor(name, config.tie_word_embeddings):
                raise MidusError(
                    f"{source} lacks the tensor {name!r} that its config calls for; fetch it again"
                )
        elif stored[name] != tuple(tensor.shape):
            raise MidusError(
                f"{source} has {name!r} of shape {list(stored[name])}, and its config calls for "
                f"{list(tensor.shape)}; config and weights do not fit together"
            )


def refuse_too_long(length: int | None, config: Any, option: str) -> None:
    """Refuses to let a model read further than its positions go."""
    positions = getattr(config, "max_position_embeddings", None)
    if length is not None and positions is not None and length > positions:
        raise MidusError(
            f"{option}={length} is more than the model's {positions} positions; lower it"
        )

"""MIDUS: grow a pre-trained language model by memory blocks between its layers.

`import midus` is light: public names load on first use, and the up-scaled models are registered
with transformers' Auto classes when those are imported (`midus.registration`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from midus.registration import register_with_transformers

if TYPE_CHECKING:
    from midus.config import MemoryConfig, UpscaleConfig
    from midus.errors import MidusError
    from midus.models.adapters import lora_targets
    from midus.models.delta import save_delta
    from midus.models.loading import load_model
    from midus.models.record import set_trainable
    from midus.upscaling import upscale, upscale_checkpoint

__version__ = "0.1.0"

_PUBLIC = {
    "MemoryConfig": "midus.config",
    "MidusError": "midus.errors",
    "UpscaleConfig": "midus.config",
    "load_model": "midus.models.loading",
    "lora_targets": "midus.models.adapters",
    "save_delta": "midus.models.delta",
    "set_trainable": "midus.models.record",
    "upscale": "midus.upscaling",
    "upscale_checkpoint": "midus.upscaling",
}

__all__ = [
    "MemoryConfig",
    "MidusError",
    "UpscaleConfig",
    "__version__",
    "load_model",
    "lora_targets",
    "save_delta",
    "set_trainable",
    "upscale",
    "upscale_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_with_transformers()

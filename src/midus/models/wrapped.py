"""Models inside of others: what `torch.compile` and data-parallel training wrap around one."""

from typing import Any

from midus.errors import MidusError


def bare(model: Any) -> Any:
    """The model itself, which is the same object to train, save or grow.

    Raises:
        MidusError: Where adapters are part of it: they are no blocks of the model.
    """
    while hasattr(model, "_orig_mod") or type(model).__name__.endswith("DataParallel"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise MidusError(
            f"the {type(model).__name__} has PEFT adapters; merge_and_unload() or unload() it first"
        )
    return model

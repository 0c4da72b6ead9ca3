"""Which tensors train.

Paper, Section 5.1: in continual pre-training the inserted blocks, or everything for the base and
SOLAR; in fine-tuning everything.
"""

from typing import Any

from midus.errors import MidusError
from midus.models.record import record_of, set_trainable


def choose_trainable(model: Any, stage: str, trainable: str = "auto") -> str:
    """Freezes what does not train, and says which set does: ``inserted`` or ``all``.

    Args:
        model: A base or a grown model.
        stage: ``cpt`` or ``sft``.
        trainable: ``inserted``, ``all`` or ``auto``.
    """
    record = record_of(model.config)
    if trainable == "inserted" and not record.get("positions"):
        raise MidusError(
            "trainable='inserted', but the model has no inserted blocks; add an upscale section or "
            "train all"
        )
    if trainable == "auto":
        inserted = stage == "cpt" and record.get("trainable") == "inserted"
        trainable = "inserted" if inserted else "all"
    if trainable == "inserted":
        set_trainable(model, "inserted")
    else:
        model.requires_grad_(True)
    return trainable


def count_trainable(model: Any) -> int:
    """Parameters that train."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

"""A delta given to vLLM itself: its tensors, then those of the base it records, one by one.

Nothing is written; the base is checked against the recorded fingerprint first.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from midus.models.checkpoint import base_names, open_base, refuse_foreign_tensors
from midus.models.weights import require_finite


def whole_weights(delta: Iterable[tuple[str, Tensor]], config: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the model that a delta and its base make up, by their final names.

    Args:
        delta: The delta's tensors by name, as vLLM reads them.
        config: Config of the delta.
    """
    base = open_base(config)
    for name, tensor in delta:
        refuse_foreign_tensors([name], config)
        yield name, require_finite(tensor, name, "the delta")
    for old, new in base_names(base, config).items():
        yield new, base.read(old)

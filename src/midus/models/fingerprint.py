"""What identifies a base: a SHA-256 that does not depend on how its files are split.

It covers the sorted tensor names, their types and shapes, and eight evenly spaced rows of every
tensor (or, on request, every element). A delta records it and is refused on any other base.
"""

import hashlib

from midus.models.weights import Weights, tensor_bytes

_SAMPLED_ROWS = 8


def sampled_rows(num_rows: int) -> list[int]:
    """The rows of a tensor that stand for all of it."""
    if num_rows <= _SAMPLED_ROWS:
        return list(range(num_rows))
    return [i * (num_rows - 1) // (_SAMPLED_ROWS - 1) for i in range(_SAMPLED_ROWS)]


def is_base_tensor(name: str, tied: bool) -> bool:
    """Whether a stored tensor is part of the model.

    Old checkpoints store rotary tables, and some store the head that is tied to the embeddings.
    """
    return not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")


def fingerprint(weights: Weights, tied: bool, every_element: bool = False) -> str:
    """The fingerprint of a stored model; ``tied`` says whether its head is its embedding."""
    digest = hashlib.sha256()
    for name in sorted(name for name in weights if is_base_tensor(name, tied)):
        entry = weights[name]
        digest.update(f"{name} {entry.dtype_name} {list(entry.shape)}\n".encode())
        if every_element:
            for piece in weights.raw(name):
                digest.update(piece)
        elif not entry.shape:
            digest.update(tensor_bytes(weights.read(name)))
        else:
            for row in sampled_rows(entry.shape[0]):
                digest.update(tensor_bytes(weights.read(name, row, 1)))
    return ("sha256-all:" if every_element else "sha256-rows:") + digest.hexdigest()


def covers_every_element(value: str) -> bool:
    """Whether a fingerprint was made from every element."""
    return value.startswith("sha256-all:")

"""Muon's step for many matrices, those of one shape at once.

`torch.optim.Muon` orthogonalizes one matrix after the other, in some thirty small kernels each; a
grown model has its matrices in few shapes, each in every inserted block, so that a batched product
does the same in as many kernels for all of them.
"""

import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Group = dict[str, Any]
State = MutableMapping[Tensor, Any]

_MOMENTUM = 0.95
# Of the quintic iteration that Muon is known with, and how often it is applied.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
# Times the root of the longer side: AdamW's root mean square ("Muon is scalable for LLM training").
_ADAMW_SIZE = 0.2
# Entries that are orthogonalized at once, which bounds the memory this takes.
_LARGEST = 1 << 26


@torch.no_grad()
def step_matrices(groups: Iterable[Group], state: State) -> None:
    """Nesterov momentum, orthogonalized, in AdamW's size: a step of all that have a gradient.

    Args:
        groups: Groups of matrices with rates and weight decays.
        state: Of an optimizer, as `torch.optim.Muon` keeps it.
    """
    for members in _alike(groups):
        matrices = [matrix for matrix, _ in members]
        directions = orthogonalize(torch.stack([_direction(m, state[m]) for m in matrices]))
        reach = _ADAMW_SIZE * math.sqrt(max(matrices[0].shape))
        for (matrix, group), direction in zip(members, directions, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(direction, alpha=-group["lr"] * reach)


def _alike(groups: Iterable[Group]) -> Iterator[Sequence[tuple[nn.Parameter, Group]]]:
    """Matrices of one shape, type and device, as many as fit together."""
    alike: dict[Any, list[tuple[nn.Parameter, Group]]] = {}
    for group in groups:
        for matrix in group["params"]:
            if matrix.grad is not None:
                kind = (matrix.shape, matrix.dtype, matrix.device)
                alike.setdefault(kind, []).append((matrix, group))
    for (shape, *_), members in alike.items():
        size = max(1, _LARGEST // shape.numel())
        for begin in range(0, len(members), size):
            yield members[begin : begin + size]


def _direction(matrix: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
    """Where the momentum points, looking one step ahead; in the type it is multiplied in."""
    grad = matrix.grad
    assert grad is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad)
    momentum = state["momentum_buffer"].lerp_(grad, 1 - _MOMENTUM)
    return grad.lerp(momentum, _MOMENTUM).bfloat16()


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearly orthogonal matrices nearest to ``[M, A, B]``, in bfloat16.

    Newton-Schulz iterations take singular values to between 0.5 and 1.5 and leave their vectors.
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalize(matrices.mT).mT
    a, b, c = _COEFFICIENTS
    found = matrices.bfloat16()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(_NUM_ITERATIONS):
        gram = found @ found.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, gram, found, beta=a)
    return found

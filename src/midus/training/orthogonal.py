"""Muon's step for many matrices, those of one shape at once.

`torch.optim.Muon` orthogonalizes one matrix after the other, in some thirty small kernels each; a
grown model has its matrices in few shapes, each in every inserted block, so that a batched product
does the same in as many kernels for all of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Group = dict[str, Any]

_MOMENTUM = 0.95
# Of the quintic iteration that Muon is known with, and how often it is applied.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
# Times the root of the longer side: AdamW's root mean square ("Muon is scalable for LLM training").
_ADAMW_SIZE = 0.2
# Entries that are orthogonalized at once, which bounds the memory this takes.
_LARGEST = 1 << 26


class Muon(Optimizer):
    """Nesterov momentum, orthogonalized; steps, in AdamW's size, and state are torch's own Muon's.

    Args:
        groups: Groups of matrices with rates and weight decays of their own.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        super().__init__(list(groups), {"lr": 1e-3, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all matrices that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for members in self._alike():
            matrices = [matrix for matrix, _ in members]
            directions = orthogonalize(torch.stack([self._direction(m) for m in matrices]))
            reach = _ADAMW_SIZE * math.sqrt(max(matrices[0].shape))
            for (matrix, group), direction in zip(members, directions, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(direction, alpha=-group["lr"] * reach)
        return loss

    def _alike(self) -> Iterator[Sequence[tuple[nn.Parameter, Group]]]:
        """Matrices of one shape, type and device, as many as fit together."""
        alike: dict[Any, list[tuple[nn.Parameter, Group]]] = {}
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    kind = (matrix.shape, matrix.dtype, matrix.device)
                    alike.setdefault(kind, []).append((matrix, group))
        for (shape, *_), members in alike.items():
            size = max(1, _LARGEST // shape.numel())
            for begin in range(0, len(members), size):
                yield members[begin : begin + size]

    def _direction(self, matrix: nn.Parameter) -> Tensor:
        """Where the momentum points, looking one step ahead; in the type it is multiplied in."""
        grad, state = matrix.grad, self.state[matrix]
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

"""Cross-entropy and its gradient in one Triton kernel, the gradient over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from midus.ops.blocks import power_of_two
from midus.ops.launch import launch

_BLOCK = 8192


@triton.jit
def _cross_entropy_kernel(
    logits, targets, losses, stride_row, width: tl.constexpr, IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride_row
    target = tl.load(targets + row)
    counts = target != IGNORED
    # A word that is not there has no loss; before the gradient overwrites the row.
    exists = (target >= 0) & (target < width)
    wanted = tl.load(line + target, mask=counts & exists, other=float("nan")).to(tl.float32)
    best = -float("inf")
    total = 0.0
    for start in range(0, width, BLOCK):
        word = start + tl.arange(0, BLOCK)
        z = tl.load(line + word, mask=word < width, other=-float("inf")).to(tl.float32)
        new_best = tl.maximum(best, tl.max(z))
        # Nothing but -inf so far: the difference would be NaN.
        base = tl.where(new_best == -float("inf"), 0.0, new_best)
        total = total * tl.exp(best - base) + tl.sum(tl.exp(z - base))
        best = new_best
    tl.store(losses + row, tl.where(counts, tl.log(total) + best - wanted, 0.0))
    for start in range(0, width, BLOCK):
        word = start + tl.arange(0, BLOCK)
        z = tl.load(line + word, mask=word < width, other=-float("inf")).to(tl.float32)
        grad = tl.exp(z - best) / total - tl.where(word == target, 1.0, 0.0)
        grad = tl.where(counts, grad, 0.0)
        tl.store(line + word, grad.to(logits.dtype.element_ty), mask=word < width)


def cross_entropy_(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The rows' summed loss; ``logits`` become its gradient."""
    num_rows, width = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        launch(
            _cross_entropy_kernel,
            (num_rows,),
            (logits, targets.contiguous(), losses, logits.stride(0)),
            {
                "width": width,
                "IGNORED": ignored,
                "BLOCK": min(power_of_two(width), _BLOCK),
                "num_warps": 8,
            },
        )
    return losses.sum()

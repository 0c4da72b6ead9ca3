"""Operators without a gradient say so, instead of returning none in silence."""

from typing import Any

import torch


def refuse_gradient(operator: str, what: str) -> None:
    """Lets a backward pass through the operator fail with one sentence."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"{operator} has no {what}; use backend='reference' for one")

    torch.library.register_autograd(operator, refuse)

"""OpT-DeUS (Cao et al., 2025): neighbours fused along an optimal-transport plan, outputs silent.

Between base blocks A and B a new block gets, matrix by matrix, ``(T^T W_A + W_B) / 2`` with T the
entropic transport plan between the rows of W_A and W_B. The FFN's input side is first carried along
the plan of the attention's output projection. `o_proj` and `down_proj` end as zero, so the block is
the identity.

The published repository uses the plan as it comes, with total mass 1, so that ``T^T W_A`` is about
1/n of W_A and the result nearly ``W_B / 2``. That is the default here, since it made the published
numbers; ``ot_rescale`` multiplies the plan by n, which is what the method it builds on does and
evidently meant.
"""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.upscaling.avg_deus import mean
from midus.upscaling.copying import interleave_copies, silence
from midus.upscaling.method import Growth, Method
from midus.upscaling.plan import StackPlan

_PLACEMENT = "top_heavy"
_FFN_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
_ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """A new block before every anchor, between it and the block before it."""
    return interleave_copies(config, num_base_layers, _PLACEMENT, "before", needs_left=True)


def make_blocks(growth: Growth) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Fuses each anchor with the block before it."""
    for position, anchor in growth.track(growth.inserted(), "solving transport problems"):
        left = {n: t.float() for n, t in growth.base.read_block(anchor - 1).items()}
        right = {n: t.float() for n, t in growth.base.read_block(anchor).items()}
        block = fuse(left, right, growth.options)
        yield position, silence({name: t.to(growth.dtype) for name, t in block.items()})


def fuse(
    left: dict[str, Tensor], right: dict[str, Tensor], options: UpscaleConfig
) -> dict[str, Tensor]:
    """The new block's tensors before its outputs are silenced.

    Tensors the method does not speak of (norms of attention heads, norms after a layer) are
    averaged; a bias moves with the rows of its weight.
    """
    fused = {name: mean(left[name], right[name]) for name in right}
    output = "self_attn.o_proj"
    output_plan = transport(left[f"{output}.weight"], right[f"{output}.weight"], options)
    for matrix in _ATTENTION_INPUTS:
        _fuse_rows(fused, left, right, matrix, left[f"{matrix}.weight"], options)
    for matrix in _FFN_INPUTS:
        _fuse_rows(fused, left, right, matrix, left[f"{matrix}.weight"] @ output_plan, options)
    norm = _ffn_input_norm(right)
    if norm is not None:
        carried = (left[norm] @ output_plan + left[norm]) / 2  # w (T / 2 + I / 2)
        fused[norm] = (carried + right[norm]) / 2
    return fused


def _fuse_rows(
    fused: dict[str, Tensor],
    left: dict[str, Tensor],
    right: dict[str, Tensor],
    matrix: str,
    aligned: Tensor,
    options: UpscaleConfig,
) -> None:
    plan = transport(aligned, right[f"{matrix}.weight"], options)
    fused[f"{matrix}.weight"] = (plan.T @ aligned + right[f"{matrix}.weight"]) / 2
    if (bias := f"{matrix}.bias") in right:
        fused[bias] = (plan.T @ left[bias] + right[bias]) / 2


def transport(first: Tensor, second: Tensor, options: UpscaleConfig) -> Tensor:
    """The entropic transport plan between the rows of two matrices, uniform on both sides.

    Solved in the log domain, where small regularisation cannot underflow.
    """
    ot = _pot()
    cost = torch.cdist(first.double(), second.double())
    if options.ot_normalize_cost:
        cost = cost / cost.max().clamp_min(torch.finfo(cost.dtype).tiny)
    rows, columns = cost.shape
    plan: Tensor
    plan, log = ot.sinkhorn(
        torch.full((rows,), 1 / rows, dtype=cost.dtype),
        torch.full((columns,), 1 / columns, dtype=cost.dtype),
        cost,
        options.ot_reg,
        method="sinkhorn_log",
        numItermax=options.ot_max_iter,
        stopThr=options.ot_tolerance,
        warn=False,
        log=True,
    )
    if not plan.isfinite().all():
        raise MidusError(f"ot_reg={options.ot_reg} gives no transport plan; use a larger one")
    if log["err"] and log["err"][-1] > options.ot_tolerance:
        warnings.warn(
            f"a transport problem did not come within ot_tolerance={options.ot_tolerance} in "
            f"{options.ot_max_iter} iterations; raise either for a better plan",
            stacklevel=2,
        )
    return plan.float() * (columns if options.ot_rescale else 1)


def _ffn_input_norm(block: dict[str, Tensor]) -> str | None:
    """The norm before the FFN: Gemma names it so, Llama's follows attention, OLMo 2 has none."""
    if "pre_feedforward_layernorm.weight" in block:
        return "pre_feedforward_layernorm.weight"
    return "post_attention_layernorm.weight" if "input_layernorm.weight" in block else None


def _pot() -> Any:
    # POT looks for every framework it could compute with. Found so, JAX takes three quarters of a
    # GPU's memory and keeps them.
    for name in ("JAX", "TENSORFLOW", "CUPY"):
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{name}", "1")
    try:
        import ot
    except ImportError as error:
        raise MidusError("method 'opt_deus' needs the package POT; run: pip install POT") from error
    return ot


METHOD = Method(
    name="opt_deus",
    summary="neighbours fused by optimal transport, started as the identity",
    paper="Cao et al., 2025",
    inserts="copy",
    preserves_function=True,
    trains="inserted",
    default_placement=_PLACEMENT,
    make_plan=make_plan,
    make_blocks=make_blocks,
)

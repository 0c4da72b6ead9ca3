"""What a slot writes: realised values, their norms, and the tokens they push (logit lens).

Paper, Eq. 5: head h reads slot s as ``V-bar[s] W_h`` and adds it to its slice of the residual
stream. Layers with full-width values add the slot's value to all of it.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from midus.memory.hive import HiveValues, IndependentValues, SharedValues

_SLOTS_AT_ONCE = 4096
_TOKENS_AT_ONCE = 8192
_NUM_BINS = 40


def realised_values(layer: Any, head: int, slots: Tensor) -> Tensor:
    """What a head reads from slots at weight 1: ``[S, O]``, or ``[S, D]`` where heads are summed.

    Args:
        layer: A memory layer.
        head: The head that reads.
        slots: Slot numbers ``[S]``.
    """
    values = layer.values
    if isinstance(values, HiveValues):
        return values.latent_values[slots].float() @ values.value_proj[head].float()
    if isinstance(values, SharedValues):
        return values.values[slots].float()
    if isinstance(values, IndependentValues):
        return values.values[head, slots].float()
    # Full-width values: a token with one head that chose one slot. UltraMem weighs it by core.
    slot_idx = slots.view(-1, 1, 1)
    num_cores = getattr(layer.keys, "cores", torch.empty(0)).shape[0]
    shape = (*slot_idx.shape, num_cores) if num_cores else slot_idx.shape
    read: Tensor = values(slot_idx, torch.ones(shape, device=slots.device))
    return read.float()


def written_values(block: Any, head: int, slots: Tensor) -> Tensor:
    """What slots add to the residual stream when a head reads them at weight 1: ``[S, D]``."""
    values = realised_values(block.memory, head, slots)
    if _is_headwise(block.memory):
        width = values.shape[-1]
        values = F.pad(values, (head * width, (block.memory.num_heads - 1 - head) * width))
    if block.memory_map is not None:
        values = F.linear(values, block.memory_map.float())
    return values


@torch.no_grad()
def value_norms(block: Any) -> Tensor:
    """Norm of what each slot writes, by head: ``[H, N]``, or ``[1, N]`` if heads write the same."""
    layer = block.memory
    is_headwise = _is_headwise(layer)
    # In a slice of its own a value is as long as in the stream; a projection may change that.
    is_plain = is_headwise and block.memory_map is None
    device = next(layer.parameters()).device
    norms = torch.empty(layer.num_heads if is_headwise else 1, layer.num_slots)
    for head in range(len(norms)):
        for slots in torch.arange(layer.num_slots, device=device).split(_SLOTS_AT_ONCE):
            values = (
                realised_values(layer, head, slots)
                if is_plain
                else written_values(block, head, slots)
            )
            norms[head, slots.cpu()] = values.norm(dim=-1).cpu()
    return norms


@torch.no_grad()
def describe_norms(block: Any) -> dict[str, Any]:
    """Quantiles of the norms, a histogram of those above zero, and the table's rows of zeros."""
    # In float32, norms that hardly differ leave no room for bins between them.
    norms = value_norms(block).flatten().double().numpy()
    values = block.memory.values
    table = values.latent_values if isinstance(values, HiveValues) else values.values
    rows = table.detach().flatten(0, -2)
    median, p90 = np.quantile(norms, (0.5, 0.9))
    written = np.log10(norms[norms > 0])
    counts, edges = np.histogram(written, bins=_NUM_BINS)
    return {
        "min": float(norms.min()),
        "median": float(median),
        "p90": float(p90),
        "max": float(norms.max()),
        "zero_rows": int((rows == 0).all(dim=-1).sum()),
        "num_rows": len(rows),
        "histogram": {"edges": (10**edges).tolist(), "counts": counts.tolist()},
    }


@torch.no_grad()
def token_logits(model: Any, vectors: Tensor) -> Tensor:
    """Vectors of the residual stream through the final norm's gain and the unembedding.

    The norm's division by the size of the whole stream is left out, and so are all later blocks.

    Args:
        model: A causal language model.
        vectors: ``[S, D]``.

    Returns:
        ``[S, vocabulary]`` in float32.
    """
    # Families write the gain as w or as 1 + w; what they make of ones is the gain either way.
    norm = model.model.norm
    gain = norm(torch.ones(1, vectors.shape[-1], device=norm.weight.device))
    unembedding = model.get_output_embeddings().weight
    vectors = (vectors.to(gain.device) * gain).to(unembedding.device).float()
    logits = [vectors @ rows.float().T for rows in unembedding.split(_TOKENS_AT_ONCE)]
    return torch.cat(logits, dim=-1)


def _is_headwise(layer: Any) -> bool:
    return isinstance(layer.values, HiveValues | SharedValues | IndependentValues)

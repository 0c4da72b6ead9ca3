"""Head importance of a grown model beside its base's: does it grow more uneven?

Paper, figure "head importance": (a) the base, (b) the grown model, (c) the variance of IS_h over
the heads of each layer. Blocks of the base are compared by their index in the base; inserted blocks
are listed apart. A variance rises with the scores themselves, so the summary has the Gini
coefficient too, which does not.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midus.analysis.examples import Example
from midus.analysis.head_importance import Loss, Reduction, Track, head_importance
from midus.errors import MidusError
from midus.models.configuration import read_config
from midus.models.families import PREFIX, is_upscaled
from midus.models.identity import model_id
from midus.models.loading import load_model, load_tokenizer
from midus.models.record import base_of, is_delta, num_base_layers, record_of
from midus.models.sources import resolve_source


def compare_heads(
    model: str,
    examples: Sequence[Example],
    *,
    base: str | None = None,
    reduction: Reduction = "example",
    loss: Loss = "sum",
    layer_norm: bool = False,
    batch_size: int = 8,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    track: Track = lambda items, _: items,
) -> dict[str, Any]:
    """Scores of both models, one after the other, in one type.

    A plain model stands alone, and so does a full one whose recorded base is gone.

    Args:
        model: The grown model, as ``load_model`` takes it.
        examples: What to measure on.
        base: Its base; default: the one it records.
        reduction: As ``head_importance`` takes it.
        loss: As ``head_importance`` takes it.
        layer_norm: As ``head_importance`` takes it.
        batch_size: Examples of a pass; scores differ by rounding only.
        dtype: Type of both; default: the base's.
        device: Where to run; default: the GPU if there is one.
        track: Wraps loops in a progress bar.

    Returns:
        What ``heads.json`` holds; everything about the base is None where there is none.
    """
    folder = resolve_source(model)
    config = read_config(folder)
    name, base_folder = _find_base(model, config, base)
    tokenizer = load_tokenizer(base_folder or folder)

    def measure(loaded: Any, description: str) -> Tensor:
        return head_importance(
            loaded,
            tokenizer,
            examples,
            reduction=reduction,
            loss=loss,
            layer_norm=layer_norm,
            batch_size=batch_size,
            track=lambda items, _: track(items, description),
        )

    base_facts = base_scores = None
    if name is not None and base_folder is not None:
        base_config = read_config(base_folder)
        _refuse_mismatch(model, config, name, base_config)
        loaded = load_model(base_folder, dtype=dtype, device=device)
        dtype, device = loaded.dtype, str(loaded.device)
        base_scores = measure(loaded, "running the base")
        base_facts = {
            "model": name,
            "model_id": model_id(base_folder),
            "num_layers": base_scores.shape[0],
            "num_heads": base_scores.shape[1],
        }
        del loaded  # one model in memory at a time
    loaded = load_model(
        folder, base=base_folder if is_delta(config) else None, dtype=dtype, device=device
    )
    scores = measure(loaded, "running the model")
    result: dict[str, Any] = {
        "task": examples[0].task if len({e.task for e in examples}) == 1 else "custom",
        "num_examples": len(examples),
        "reduction": reduction,
        "loss": loss,
        "layer_norm": layer_norm,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "base": base_facts,
        "layers": {"base": None, "model": list_layers(config)},
        "importance": {"base": None, "model": scores.tolist()},
        "variance": {"base": None, "model": _variance(scores).tolist()},
        "summary": None,
    }
    if base_scores is not None:
        result["layers"]["base"] = list_layers(base_config)
        result["importance"]["base"] = base_scores.tolist()
        result["variance"]["base"] = _variance(base_scores).tolist()
        result["summary"] = summarise(base_scores, scores, result["layers"]["model"])
    return result


def list_layers(config: Any) -> list[dict[str, Any]]:
    """Each block of a model: final index, kind, and the base block it is or was made from."""
    record = record_of(config)
    inserted = dict(zip(record.get("positions", []), record.get("anchors", []), strict=True))
    kind = "memory" if is_upscaled(config.model_type) else "copy"
    base = iter(range(config.num_hidden_layers))
    return [
        {"index": i, "base_index": inserted[i], "kind": kind}
        if i in inserted
        else {"index": i, "base_index": next(base), "kind": "base"}
        for i in range(config.num_hidden_layers)
    ]


def summarise(base: Tensor, model: Tensor, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """What changed in the base's blocks.

    Args:
        base: Scores of the base, ``[L, H]``.
        model: Scores of the grown model, ``[L + D, H]``.
        layers: The grown model's blocks, as ``list_layers`` has them.
    """
    same = model[[layer["index"] for layer in layers if layer["kind"] == "base"]]
    before, after = _variance(base), _variance(same)
    ratios = (after / before)[before > 0]
    return {
        "num_base_layers": len(base),
        "num_layers_of_higher_variance": int((after > before).sum()),
        "mean_variance_ratio": ratios.mean().item() if len(ratios) else None,
        "median_variance_ratio": ratios.median().item() if len(ratios) else None,
        "share_of_risen_heads": (same > base).double().mean().item(),
        "mean_importance": {"base": base.mean().item(), "model": same.mean().item()},
        "mean_gini": {"base": gini(base).mean().item(), "model": gini(same).mean().item()},
    }


def gini(scores: Tensor) -> Tensor:
    """How unevenly each row is shared out: 0 evenly, ``1 - 1 / H`` all to one head."""
    num_heads = scores.shape[-1]
    total = scores.sum(-1)
    rank = torch.arange(1, num_heads + 1, dtype=scores.dtype)
    weighted = (rank * scores.sort(-1).values).sum(-1)
    shares = 2 * weighted / (num_heads * total) - (num_heads + 1) / num_heads
    return torch.where(total > 0, shares, torch.zeros_like(shares))


def _variance(scores: Tensor) -> Tensor:
    return scores.var(1, correction=0)  # of the population: these are all the heads there are


def _find_base(model: str, config: Any, base: str | None) -> tuple[str | None, Path | None]:
    if base is not None:
        return base, resolve_source(base)
    if not record_of(config):
        return None, None
    recorded = base_of(config)
    try:
        if not recorded.get("id"):
            raise MidusError(f"{model} does not record its base")
        return recorded["id"], resolve_source(recorded["id"], recorded.get("revision"))
    except MidusError as error:
        if is_delta(config):
            raise MidusError(
                f"the recorded base cannot be used: {error}; or give another with --base"
            ) from error
        warnings.warn(
            f"the recorded base cannot be used: {error}; the model is measured alone, give "
            "--base to compare",
            stacklevel=3,
        )
        return None, None


def _refuse_mismatch(model: str, config: Any, base: str, base_config: Any) -> None:
    for own, others in zip(_shape(config), _shape(base_config), strict=True):
        if own != others:
            raise MidusError(
                f"{model} has {own} and {base} has {others}; give the base it was made from"
            )


def _shape(config: Any) -> tuple[str, ...]:
    """What a grown model has from its base, in words."""
    return (
        f"the model type {config.model_type.removeprefix(PREFIX)}",
        f"{num_base_layers(config)} base blocks",
        f"{config.num_attention_heads} heads",
        f"the width {config.hidden_size}",
        f"a vocabulary of {config.vocab_size}",
    )

"""Controls: what else so many trainable parameters could do, without growing the model.

LoRA on every linear layer of the base (PEFT), or its last layers unfrozen, each with as many
trainable parameters as the up-scaled model has, as near as whole ranks and whole layers allow.
"""

import importlib.util
from typing import Any

import torch

from midus.errors import MidusError


def apply_control(model: Any, kind: str, target: int, seed: int = 0) -> Any:
    """The base with about ``target`` parameters trainable.

    Args:
        model: The base.
        kind: ``lora`` or ``last_layers``.
        target: Trainable parameters to come near to.
        seed: Of LoRA's start.
    """
    return _lora(model, target, seed) if kind == "lora" else _last_layers(model, target)


def causal_lm(model: Any) -> Any:
    """The model inside PEFT's wrapper, where there is one."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def lora_rank(model: Any, target: int) -> int:
    """The rank at which LoRA on every linear layer of the blocks has nearest to ``target``."""
    a_rank: int = sum(m.in_features + m.out_features for _, m in _block_linears(model))
    return max(1, round(target / a_rank))


def check_control(kind: str) -> None:
    """Refuses a control whose package is missing."""
    if kind == "lora" and importlib.util.find_spec("peft") is None:
        raise MidusError("control 'lora' needs the package peft; run: pip install 'midus[train]'")


def _lora(model: Any, target: int, seed: int) -> Any:
    check_control("lora")
    from peft import LoraConfig, get_peft_model

    rank = lora_rank(model, target)
    leaves = sorted({name.rpartition(".")[2] for name, _ in _block_linears(model)})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return get_peft_model(
            model,
            LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=leaves, task_type="CAUSAL_LM"),
        )


def _block_linears(model: Any) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.model.layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]


def _last_layers(model: Any, target: int) -> Any:
    """Whole blocks from the top; the number whose sum is nearest to ``target``."""
    model.requires_grad_(False)
    sums, total = [0], 0
    for layer in reversed(model.model.layers):
        total += sum(p.numel() for p in layer.parameters())
        sums.append(total)
    count = max(1, min(range(len(sums)), key=lambda i: abs(sums[i] - target)))
    for layer in model.model.layers[-count:]:
        layer.requires_grad_(True)
    return model

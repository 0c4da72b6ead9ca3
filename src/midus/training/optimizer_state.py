"""The optimizer's state as safetensors, one file, or one a rank where the parameters are sharded.

Nothing is unpickled on the way back, and no rank ever holds more than its own share.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from midus.errors import MidusError

_GROUP_KEYS = ("lr", "initial_lr", "weight_decay", "name")


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are split among ranks (FSDP2)."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def state_file(folder: Path, rank: int, world_size: int, sharded: bool) -> Path:
    """Where a rank's state is."""
    if not sharded:
        return folder / "optimizer.safetensors"
    return folder / f"optimizer-{rank:05}-of-{world_size:05}.safetensors"


def save_optimizer(optimizer: Any, model: nn.Module, path: Path) -> None:
    """Writes the local part of the state: moments by parameter name, numbers in the header."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                held = local.detach().cpu().contiguous()
                # Tables that several parameters share (8-bit optimizers) are written for each.
                tensors[f"{key}/{name}"] = held.clone() if held.data_ptr() in seen else held
                seen.add(held.data_ptr())
            else:
                numbers[f"{key}/{name}"] = value
    groups = [{k: g[k] for k in _GROUP_KEYS if k in g} for g in optimizer.param_groups]
    header = {"format": "pt", "numbers": json.dumps(numbers), "groups": json.dumps(groups)}
    save_file(tensors, path, header)


def load_optimizer(optimizer: Any, model: nn.Module, path: Path) -> None:
    """Puts a stored state back, on the devices and in the shards of the parameters."""
    from safetensors import safe_open

    if not path.is_file():
        raise MidusError(
            f"{path} does not exist; a sharded run resumes with as many processes as it was saved "
            "with"
        )
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    stored = tensors | json.loads(header["numbers"])
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    names = {key.partition("/")[2] for key in stored}
    if stored and names != set(trained):
        odd = min(names ^ set(trained))
        raise MidusError(
            f"{path} holds the state of other parameters than those that train here ({odd} is in "
            "one and not in the other); resume with the options the run began with"
        )
    # A fused optimizer counts its steps on the device, any other on the CPU.
    counts_on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for full_key, value in stored.items():
        key, _, name = full_key.partition("/")
        parameter = trained[name]
        stays = key == "step" and not counts_on_device[id(parameter)]
        state = optimizer.state.setdefault(parameter, {})
        state[key] = value if stays else _placed(value, parameter)
    for group, saved in zip(optimizer.param_groups, json.loads(header["groups"]), strict=True):
        group.update(saved)


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(parameter, DTensor) and value.ndim:
        return DTensor.from_local(
            value.to(parameter.to_local().device),
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return value.to(parameter.device)


def full_state(model: nn.Module, names: set[str] | None, keep: bool) -> dict[str, Tensor]:
    """Whole tensors of the model on the CPU; every rank takes part, those that ``keep`` get them.

    Args:
        model: Sharded or not.
        names: Which tensors; None is all.
        keep: Whether this rank keeps what it gathers.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if names is not None and name not in names:
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            state[name] = whole.detach().cpu().contiguous()
    return state


def fill_state(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copies whole tensors into the model, sharded or not."""
    from torch.distributed.tensor import distribute_tensor

    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            target = own[name]
            if isinstance(target, DTensor):
                tensor = tensor.to(device=target.to_local().device, dtype=target.dtype)
                target.copy_(distribute_tensor(tensor, target.device_mesh, target.placements))
            else:
                target.copy_(tensor)

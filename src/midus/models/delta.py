"""Delta checkpoints in and out: the inserted tensors, with the base they belong to."""

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from midus.errors import MidusError
from midus.models.atomic import atomic_folder, refuse_overlap
from midus.models.card import read_licence
from midus.models.checkpoint import (
    DELTA_NAME,
    base_names,
    copy_companions,
    full_name,
    is_inserted,
    open_base,
    refuse_foreign_tensors,
    write_surroundings,
)
from midus.models.fingerprint import fingerprint, is_base_tensor
from midus.models.record import base_of, record_of, update_record
from midus.models.sources import source_id
from midus.models.untrusted import reason_of, shown
from midus.models.weights import Weights, require_finite, require_floats
from midus.models.wrapped import bare

HUB_KEYS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
_BASE_HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "token")


def load_delta(model_class: Any, source: Any, base: Any, *args: Any, **kwargs: Any) -> Any:
    """The model that a delta and its base make up, through Hugging Face's own loader.

    Args:
        model_class: Class to load; its ``from_pretrained`` takes a state dict.
        source: Folder or hub id of the delta.
        base: Where the base is, if not where the delta says.
        *args: Passed on.
        **kwargs: Passed on, as ``from_pretrained`` takes them.
    """
    from transformers import GenerationConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.utils.hub import cached_file

    hub = {key: kwargs[key] for key in HUB_KEYS if key in kwargs}
    config = kwargs.pop("config", None)
    if hasattr(config, "num_hidden_layers"):
        config = copy.deepcopy(config)
    else:
        # As PreTrainedModel does: what is a config field goes there, the rest to the model.
        kept = {str(key): kwargs.pop(key) for key in ("dtype", "torch_dtype") if key in kwargs}
        config, kwargs = model_class.config_class.from_pretrained(
            config or source, return_unused_kwargs=True, **kwargs
        )
        kwargs.update(kept)
    weights = open_base(config, base, **{key: hub[key] for key in _BASE_HUB_KEYS if key in hub})
    delta = Weights.open_file(Path(str(cached_file(source, DELTA_NAME, **hub))))
    names = base_names(weights, config)
    refuse_unfit_delta(model_class, config, delta, names, weights, source)
    state_dict = {new: _LazyTensor(weights, old) for old, new in names.items()}
    state_dict.update({name: _LazyTensor(delta, name, source) for name in delta})
    if is_deepspeed_zero3_enabled():
        state_dict = {name: tensor[...] for name, tensor in state_dict.items()}
    if "generation_config" not in kwargs:
        with suppress(OSError):  # not every base has one
            kwargs["generation_config"] = _generation_config(GenerationConfig, source, hub)
    update_record(config, is_delta=False)
    want_info = kwargs.pop("output_loading_info", False)
    model, info = model_class.from_pretrained(
        None, *args, config=config, state_dict=state_dict, output_loading_info=True, **kwargs
    )
    if info["missing_keys"]:
        raise MidusError(
            f"{source} and its base lack {len(info['missing_keys'])} tensors of the model, "
            f"{min(info['missing_keys'])} among them; fetch the delta again"
        )
    model.name_or_path = model.config.name_or_path = str(source)
    return (model, info) if want_info else model


def refuse_unfit_delta(
    model_class: Any,
    config: Any,
    delta: Weights,
    names: dict[str, str],
    base: Weights,
    source: Any,
) -> None:
    """Refuses a delta whose tensors are not the inserted ones its config describes.

    It reads headers only, and comes before anything of a recorded size is allocated.

    Args:
        model_class: Class that is to be loaded.
        config: Config of the delta.
        delta: The delta's tensors.
        names: Name in the up-scaled model by name in the base.
        base: The base's tensors.
        source: What to call the delta in messages.
    """
    refuse_foreign_tensors(delta, config)
    require_floats(delta, source)
    if not getattr(config, "quantization_config", None):
        require_floats(base, "the base")
    with torch.device("meta"):
        state_dict = model_class(copy.deepcopy(config)).state_dict()
    wanted = {full_name(name): tuple(tensor.shape) for name, tensor in state_dict.items()}
    stored = {new: base[old].shape for old, new in names.items()}
    stored |= {name: entry.shape for name, entry in delta.items()}
    missing = [
        name
        for name in wanted
        if name not in stored and is_base_tensor(name, config.tie_word_embeddings)
    ]
    if missing:
        raise MidusError(
            f"{source} and its base lack {len(missing)} tensors of the model, "
            f"{min(missing)} among them; fetch the delta again"
        )
    for name, shape in stored.items():
        if name in delta and name not in wanted:
            raise MidusError(
                f"{DELTA_NAME} holds {shown(name)!r}, which the model of its config does not have; "
                "fetch the delta again"
            )
        if wanted.get(name, shape) != shape:
            raise MidusError(
                f"{source} has {shown(name)!r} of shape {list(shape)}, and its config calls for "
                f"{list(wanted[name])}; config and weights do not fit together"
            )


def _generation_config(config_class: Any, source: Any, hub: dict[str, Any]) -> Any:
    try:
        return config_class.from_pretrained(source, **hub)
    except OSError:
        raise
    except Exception as error:
        # It sets whatever fields the file has, and checks them in as many ways.
        raise MidusError(
            f"{source} has no usable generation_config.json ({reason_of(error)}); "
            "remove it or fetch it again"
        ) from error


def save_delta(model: Any, folder: str | Path, base: str | Path | None = None) -> None:
    """Saves the inserted tensors of any grown model, copied-block ones included.

    Args:
        model: A model that `midus.upscale` made or that was loaded from its checkpoint.
        folder: Folder to write, in one atomic step.
        base: Where the base is, if the model does not record it or it has moved.
    """
    target, model = Path(folder), bare(model)
    with atomic_folder(target, keep_others=True) as work:
        config = write_delta(model, work, target, base)
        write_surroundings(work, config, base_licence(config), [], replacing=target)


def write_delta(model: Any, work: Path, target: Path, base: Any) -> Any:
    """Writes the inserted tensors into ``work`` and returns the config that goes with them."""
    config = copy.deepcopy(model.config)
    if not record_of(config):
        raise MidusError(
            f"{type(model).__name__} was not grown by midus, so it has no inserted tensors to save"
        )
    if record_of(config).get("trainable") != "inserted":
        raise MidusError(
            f"method {record_of(config).get('method')!r} trains the base's weights too, which a "
            "delta would lose; save a full checkpoint instead"
        )
    if base is not None:
        update_record(
            config, base_model={**base_of(config), "id": source_id(base), "revision": None}
        )
    weights = open_base(config)
    folders = {entry.file.parent for entry in weights.values()}
    refuse_overlap(target, *folders)
    for folder in folders:
        copy_companions(folder, work, unless_in=target)  # the tokenizer, above all
    state_dict = {full_name(name): tensor for name, tensor in model.state_dict().items()}
    _refuse_changed_base(weights, state_dict, config)
    known = base_of(config)
    known.setdefault("fingerprint", fingerprint(weights, config.tie_word_embeddings))
    update_record(config, base_model=known)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in state_dict.items()
        if is_inserted(name, config)
    }
    write_inserted(model, work, config, tensors)
    return config


def write_inserted(model: Any, work: Path, config: Any, tensors: dict[str, Any]) -> None:
    """Writes a delta's tensors into ``work`` and marks ``config`` as a delta's."""
    from safetensors.torch import save_file

    update_record(config, is_delta=True)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).split(".")[1]
    save_file(tensors, work / DELTA_NAME, {"format": "pt"})
    if model.can_generate():
        model.generation_config.save_pretrained(work)


def base_licence(config: Any) -> dict[str, str]:
    """The licence fields of the base, recorded or read from its card."""
    base = base_of(config)
    folder = Path(base.get("id") or "")
    recorded: dict[str, str] = base.get("licence") or {}
    return recorded or (read_licence(folder) if base.get("id") and folder.is_dir() else {})


def _refuse_changed_base(weights: Weights, state_dict: dict[str, Any], config: Any) -> None:
    """Compares every base tensor with the stored one: a delta would silently lose a change."""
    has_head = "lm_head.weight" in state_dict
    for old, new in base_names(weights, config).items():
        if new == "lm_head.weight" and not has_head:
            continue  # a decoder without its head
        held = state_dict.get(new)
        if held is None or held.is_meta:
            raise MidusError(f"{new} is missing or offloaded; load the whole model to save a delta")
        stored = weights.read(old).to(held.dtype)
        if not torch.equal(stored, held.detach().cpu()):
            raise MidusError(
                f"{new} differs from the base's {old}, so a delta would lose it; "
                "save a full checkpoint instead"
            )


def holds_its_base(model: Any) -> bool:
    """Whether every frozen tensor is the recorded base's; False too if that cannot be found."""
    config = model.config
    state_dict = {full_name(name): tensor for name, tensor in model.state_dict().items()}
    try:
        _refuse_changed_base(open_base(config), state_dict, config)
    except MidusError:
        return False
    return True


class _LazyTensor:
    """A stored tensor that Hugging Face's loader reads when its turn comes, like a slice."""

    def __init__(self, weights: Weights, name: str, delta: Any = None) -> None:
        self._weights = weights
        self._name = name
        self._delta = delta

    def __getitem__(self, key: Any) -> Any:
        tensor = self._weights.read(self._name)
        if self._delta is not None:
            require_finite(tensor, self._name, self._delta)
        return tensor if key is Ellipsis else tensor[key]

    def get_shape(self) -> list[int]:
        return list(self._weights[self._name].shape)

    def get_dtype(self) -> str:
        return self._weights[self._name].dtype_name

    @property
    def dtype(self) -> Any:
        return self._weights[self._name].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._weights[self._name].shape

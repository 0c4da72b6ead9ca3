"""`from_pretrained` and `save_pretrained` of up-scaled models: deltas, atomic saves, card."""

import copy
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from midus.errors import MidusError
from midus.models.atomic import atomic_folder, refuse_overlap
from midus.models.card import is_our_card, read_licence
from midus.models.checkpoint import (
    DELTA_NAME,
    base_names,
    full_name,
    is_inserted,
    open_base,
    refuse_foreign_tensors,
    write_surroundings,
)
from midus.models.fingerprint import fingerprint
from midus.models.sources import source_id
from midus.models.weights import Weights

_HUB_KEYS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
_BASE_HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "token")


class CheckpointMixin:
    """Loads deltas as well as full checkpoints, and saves either in one atomic step."""

    config: Any

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``PreTrainedModel.from_pretrained``; a delta also takes ``base``.

        Args:
            pretrained_model_name_or_path: A folder or hub id, full or delta.
            *args: Passed on.
            **kwargs: Passed on. ``base`` names another place of a delta's base; it must have the
                recorded fingerprint.
        """
        base = kwargs.pop("base", None)
        if pretrained_model_name_or_path is None or not _is_delta(
            cls, pretrained_model_name_or_path, kwargs
        ):
            if base is not None:
                raise MidusError(
                    f"base={str(base)!r} was given, but {pretrained_model_name_or_path} is a full "
                    "checkpoint; leave it out"
                )
            return super().from_pretrained(  # type: ignore[misc]  # PreTrainedModel's
                pretrained_model_name_or_path, *args, **kwargs
            )
        return cls._load_delta(pretrained_model_name_or_path, base, *args, **kwargs)

    @classmethod
    def _load_delta(cls, source: Any, base: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import GenerationConfig
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
        from transformers.utils.hub import cached_file

        hub = {key: kwargs[key] for key in _HUB_KEYS if key in kwargs}
        config = kwargs.pop("config", None)
        if hasattr(config, "is_delta"):
            config = copy.deepcopy(config)
        else:
            # As PreTrainedModel does: what is a config field goes there, the rest to the model.
            kept = {str(key): kwargs.pop(key) for key in ("dtype", "torch_dtype") if key in kwargs}
            config, kwargs = cls.config_class.from_pretrained(  # type: ignore[attr-defined]
                config or source, return_unused_kwargs=True, **kwargs
            )
            kwargs.update(kept)
        download = {key: hub[key] for key in _BASE_HUB_KEYS if key in hub}
        weights = open_base(config, base, **download)
        delta = Weights.open_file(Path(str(cached_file(source, DELTA_NAME, **hub))))
        refuse_foreign_tensors(delta, config)
        state_dict = {
            new: _LazyTensor(weights, old) for old, new in base_names(weights, config).items()
        }
        state_dict.update({name: _LazyTensor(delta, name) for name in delta})
        if is_deepspeed_zero3_enabled():
            state_dict = {name: tensor[...] for name, tensor in state_dict.items()}
        if "generation_config" not in kwargs:
            with suppress(OSError):  # not every base has one
                kwargs["generation_config"] = GenerationConfig.from_pretrained(source, **hub)
        config.is_delta = False
        want_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(  # type: ignore[misc]
            None, *args, config=config, state_dict=state_dict, output_loading_info=True, **kwargs
        )
        if info["missing_keys"]:
            raise MidusError(
                f"{source} and its base lack {len(info['missing_keys'])} tensors of the model, "
                f"{min(info['missing_keys'])} among them; fetch the delta again"
            )
        model.name_or_path = model.config.name_or_path = str(source)
        return (model, info) if want_info else model

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        delta: bool = False,
        base: Any = None,
        push_to_hub: bool = False,
        tags: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """As ``PreTrainedModel.save_pretrained``, atomic, with stub and model card.

        Files that other programs keep in the folder stay; the weights are replaced as a whole.

        Args:
            save_directory: Folder to write.
            is_main_process: Whether this process writes.
            delta: Write the inserted tensors only. Refused if the base's weights were changed.
            base: Where the base is, if the model does not record it or it has moved.
            push_to_hub: Upload what was saved; ``repo_id`` and the like come from ``kwargs``.
            tags: Tags of the model card besides ours.
            **kwargs: Passed on.
        """
        # PEFT adapters, distributed checkpoints and other ranks: transformers' own ways.
        if (
            getattr(self, "_hf_peft_config_loaded", False)
            or kwargs.get("distributed_checkpoint")
            or not self.should_save_on_this_rank(is_main_process)  # type: ignore[attr-defined]
        ):
            super().save_pretrained(  # type: ignore[misc]
                save_directory, is_main_process=is_main_process, push_to_hub=push_to_hub, **kwargs
            )
            return
        upload = {key: kwargs.pop(key) for key in _UPLOAD_KEYS if key in kwargs}
        target = Path(save_directory)
        with atomic_folder(target, keep_others=True) as work:
            if delta:
                config = self._write_delta(work, target, base)
            else:
                super().save_pretrained(work, **kwargs)  # type: ignore[misc]
                config = copy.deepcopy(self.config)
            write_surroundings(work, config, self._base_licence(), tags or [])
            if not is_our_card(target / "README.md"):
                (work / "README.md").unlink()  # the user's own stays
            written = [path.name for path in work.iterdir()] + ["README.md"]
        if push_to_hub:
            _upload(target, written, token=kwargs.get("token"), **upload)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        delta: bool = False,
        base: Any = None,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
        token: bool | str | None = None,
        **upload: Any,
    ) -> Any:
        """As ``PreTrainedModel.push_to_hub``; with ``delta=True`` uploads the delta."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            self.save_pretrained(
                path, delta=delta, base=base, max_shard_size=max_shard_size, tags=tags
            )
            written = [file.name for file in path.iterdir()]
            return _upload(path, written, repo_id=repo_id, token=token, **upload)

    def freeze_base(self) -> None:
        """Lets the inserted blocks train and nothing else (paper, Section 5.1)."""
        for name, parameter in self.named_parameters():  # type: ignore[attr-defined]
            parameter.requires_grad_(is_inserted(name, self.config))

    def _write_delta(self, work: Path, target: Path, base: Any) -> Any:
        """Writes the inserted tensors and returns the config that goes with them."""
        from safetensors.torch import save_file

        config = copy.deepcopy(self.config)
        if base is not None:
            config.base_model = {**config.base_model, "id": source_id(base), "revision": None}
        weights = open_base(config)
        refuse_overlap(target, *{entry.file.parent for entry in weights.values()})
        state_dict = {
            full_name(name): tensor
            for name, tensor in self.state_dict().items()  # type: ignore[attr-defined]
        }
        _refuse_changed_base(weights, state_dict, config)
        config.base_model.setdefault(
            "fingerprint", fingerprint(weights, config.tie_word_embeddings)
        )
        config.is_delta = True
        config.architectures = [type(self).__name__]
        config.dtype = str(self.dtype).split(".")[1]  # type: ignore[attr-defined]
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in state_dict.items()
            if is_inserted(name, config)
        }
        save_file(tensors, work / DELTA_NAME, {"format": "pt"})
        if self.can_generate():  # type: ignore[attr-defined]
            self.generation_config.save_pretrained(work)  # type: ignore[attr-defined]
        return config

    def _base_licence(self) -> dict[str, str]:
        folder = Path(self.config.base_model.get("id") or "")
        recorded: dict[str, str] = self.config.base_model.get("licence") or {}
        return recorded or (read_licence(folder) if folder.is_dir() else {})


class _LazyTensor:
    """A stored tensor that Hugging Face's loader reads when its turn comes, like a slice."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights = weights
        self._name = name

    def __getitem__(self, key: Any) -> Any:
        tensor = self._weights.read(self._name)
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


def _is_delta(cls: Any, source: Any, kwargs: dict[str, Any]) -> bool:
    config: Any = kwargs.get("config")
    if hasattr(config, "is_delta"):
        return bool(config.is_delta)
    hub = {key: kwargs[key] for key in _HUB_KEYS if key in kwargs}
    values, _ = cls.config_class.get_config_dict(config or source, **hub)
    return bool(values.get("is_delta"))


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


_UPLOAD_KEYS = (
    "repo_id",
    "private",
    "commit_message",
    "commit_description",
    "create_pr",
    "revision",
)


def _upload(
    folder: Path,
    files: list[str],
    repo_id: str | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
    token: bool | str | None = None,
    **kwargs: Any,
) -> Any:
    """Uploads the files a save wrote, and nothing else that lies in the folder."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo = api.create_repo(repo_id or folder.name, private=private, exist_ok=True).repo_id
    return api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        allow_patterns=sorted(set(files)),
        commit_message=commit_message or "Upload model",
        **kwargs,
    )

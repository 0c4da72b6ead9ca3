"""`from_pretrained` and `save_pretrained` of up-scaled models: deltas, atomic saves, card."""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.models.atomic import atomic_folder
from midus.models.card import read_licence
from midus.models.checkpoint import (
    DELTA_NAME,
    base_names,
    delta_tensors,
    is_inserted,
    open_base,
    write_surroundings,
)
from midus.models.fingerprint import fingerprint, sampled_rows
from midus.models.sources import source_id
from midus.models.weights import Weights, tensor_bytes

_HUB_KEYS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


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
                    f"base={base!r} was given, but {pretrained_model_name_or_path} is a full "
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
        if not hasattr(config, "is_delta"):
            # As PreTrainedModel does: what is a config field goes there, the rest to the model.
            kept = {str(key): kwargs.pop(key) for key in ("dtype", "torch_dtype") if key in kwargs}
            config, kwargs = cls.config_class.from_pretrained(  # type: ignore[attr-defined]
                config or source, return_unused_kwargs=True, **kwargs
            )
            kwargs.update(kept)
        names = base_names(weights := open_base(config, base), config)
        delta = Weights.open_file(Path(str(cached_file(source, DELTA_NAME, **hub))))
        state_dict = {new: _LazyTensor(weights, old) for old, new in names.items()}
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
        **kwargs: Any,
    ) -> None:
        """As ``PreTrainedModel.save_pretrained``, atomic, with stub and model card.

        Files that other programs keep in the folder stay; the weights are replaced as a whole.

        Args:
            save_directory: Folder to write.
            is_main_process: Whether this process writes.
            delta: Write the inserted tensors only. Refused if the base's weights were changed.
            base: Where the base is, if the model does not record it or it has moved.
            push_to_hub: Upload the saved folder; ``repo_id`` and the like come from ``kwargs``.
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
        hub_kwargs = {
            key: kwargs.pop(key)
            for key in ("repo_id", "private", "commit_message", "create_pr", "revision")
            if key in kwargs
        }
        target = Path(save_directory)
        with atomic_folder(target, overwrite=True, keep_others=True) as work:
            if delta:
                self._write_delta(work, base)
            else:
                super().save_pretrained(work, **kwargs)  # type: ignore[misc]
            write_surroundings(work, self.config, self._base_licence())
        self.config.is_delta = False
        if push_to_hub:
            _upload(target, token=kwargs.get("token"), **hub_kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads the model, or with ``delta=True`` its delta, with stub and card."""
        hub_keys = ("private", "token", "commit_message", "create_pr", "revision")
        hub_kwargs = {key: kwargs.pop(key) for key in hub_keys if key in kwargs}
        kwargs.pop("tags", None)  # the card has its own
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(Path(folder) / "model", **kwargs)
            return _upload(Path(folder) / "model", repo_id=repo_id, **hub_kwargs)

    def freeze_base(self) -> None:
        """Lets the inserted blocks train and nothing else (paper, Section 5.1)."""
        for name, parameter in self.named_parameters():  # type: ignore[attr-defined]
            parameter.requires_grad_(is_inserted(name, self.config))

    def _write_delta(self, folder: Path, base: Any) -> None:
        from safetensors.torch import save_file

        if base is not None:
            self.config.base_model = {
                **self.config.base_model,
                "id": source_id(base),
                "revision": None,
            }
        weights = open_base(self.config)
        state_dict = self.state_dict()  # type: ignore[attr-defined]
        _refuse_changed_base(weights, state_dict, self.config)
        if not self.config.base_model.get("fingerprint"):
            self.config.base_model = {
                **self.config.base_model,
                "fingerprint": fingerprint(weights, self.config.tie_word_embeddings),
            }
        save_file(delta_tensors(state_dict, self.config), folder / DELTA_NAME, {"format": "pt"})
        self.config.is_delta = True
        self.config.architectures = [type(self).__name__]
        self.config.dtype = str(self.dtype).split(".")[1]  # type: ignore[attr-defined]
        if self.can_generate():  # type: ignore[attr-defined]
            self.generation_config.save_pretrained(folder)  # type: ignore[attr-defined]

    def _base_licence(self) -> str | None:
        recorded: str | None = self.config.base_model.get("license")
        folder = Path(self.config.base_model.get("id") or "")
        return recorded or (read_licence(folder) if folder.is_dir() else None)


def _is_delta(cls: Any, source: Any, kwargs: dict[str, Any]) -> bool:
    config: Any = kwargs.get("config")
    if hasattr(config, "is_delta"):
        return bool(config.is_delta)
    hub = {key: kwargs[key] for key in _HUB_KEYS if key in kwargs}
    values, _ = cls.config_class.get_config_dict(config or source, **hub)
    return bool(values.get("is_delta"))


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


def _refuse_changed_base(weights: Weights, state_dict: dict[str, Any], config: Any) -> None:
    for old, new in base_names(weights, config).items():
        held: Any = state_dict.get(new)
        entry = weights[old]
        same = held is not None and tuple(held.shape) == entry.shape
        for row in sampled_rows(entry.shape[0]) if same and entry.shape else []:
            stored = weights.read(old, row, 1).to(held.dtype)
            same = same and tensor_bytes(stored) == tensor_bytes(held[row : row + 1])
        if not same:
            raise MidusError(
                f"{new} differs from the base's {old}, so a delta would lose it; "
                "save a full checkpoint instead"
            )


def _upload(
    folder: Path, repo_id: str | None = None, private: bool | None = None, **kwargs: Any
) -> Any:
    from huggingface_hub import HfApi

    api = HfApi(token=kwargs.pop("token", None))
    repo = api.create_repo(repo_id or folder.name, private=private, exist_ok=True).repo_id
    return api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        commit_message=kwargs.pop("commit_message", None) or "Upload model",
        **kwargs,
    )

"""`from_pretrained` and `save_pretrained` of up-scaled models: deltas, atomic saves, card."""

import copy
import tempfile
from pathlib import Path
from typing import Any

from transformers import GenerationMixin

from midus.errors import MidusError
from midus.models.atomic import atomic_folder
from midus.models.checkpoint import write_surroundings
from midus.models.delta import HUB_KEYS, base_licence, load_delta, write_delta
from midus.models.quantized import leave_inserted
from midus.models.record import set_trainable
from midus.models.wrapped import bare

_UPLOAD_KEYS = (
    "repo_id",
    "private",
    "commit_message",
    "commit_description",
    "create_pr",
    "revision",
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
        source = pretrained_model_name_or_path
        known = {} if source is None else _known_config(cls, source, kwargs)
        if kwargs.get("quantization_config") is not None and known:
            kwargs["quantization_config"] = leave_inserted(
                kwargs["quantization_config"],
                known["memory_positions"],
                "model." if issubclass(cls, GenerationMixin) else "",
            )
        if known.get("is_delta"):
            return _load_delta_adapted(cls, source, base, *args, **kwargs)
        if base is not None:
            raise MidusError(
                f"base={str(base)!r} was given, but {source} is a full checkpoint; leave it out"
            )
        return super().from_pretrained(source, *args, **kwargs)  # type: ignore[misc]

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
        if delta and any(hasattr(p, "device_mesh") for p in self.parameters()):  # type: ignore[attr-defined]
            raise MidusError(
                "the model's weights are shared out over processes, and a delta is written by one; "
                "save a full checkpoint, or load the model whole"
            )
        if delta:
            _refuse_beside_a_delta(self, kwargs)
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
        with atomic_folder(target, keep_others=True, variant=kwargs.get("variant")) as work:
            if delta:
                config = write_delta(self, work, target, base)
            else:
                super().save_pretrained(work, **kwargs)  # type: ignore[misc]
                config = copy.deepcopy(self.config)
            write_surroundings(work, config, base_licence(config), tags or [], replacing=target)
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
        set_trainable(self)


def _refuse_beside_a_delta(model: Any, options: dict[str, Any]) -> None:
    bare(model)  # which has no adapters
    for name in ("state_dict", "distributed_checkpoint", "variant"):
        if options.get(name):
            raise MidusError(
                f"save_pretrained(delta=True) writes the model's own inserted tensors, and takes "
                f"no {name}; leave one of them out"
            )


def _load_delta_adapted(cls: Any, source: Any, base: Any, *args: Any, **kwargs: Any) -> Any:
    """A delta, and the PEFT adapter for which an Auto class found it to be the model."""
    adapter = dict(kwargs.pop("adapter_kwargs", None) or {})
    name, path = kwargs.pop("adapter_name", "default"), adapter.pop("_adapter_model_path", None)
    loaded = load_delta(cls, source, base, *args, **kwargs)
    if path is not None:
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.load_adapter(path, adapter_name=name, adapter_kwargs=adapter)
    return loaded


def _known_config(cls: Any, source: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positions of the memory blocks and whether the checkpoint is a delta."""
    config: Any = kwargs.get("config")
    if hasattr(config, "is_delta"):
        return {"memory_positions": config.memory_positions, "is_delta": config.is_delta}
    hub = {key: kwargs[key] for key in HUB_KEYS if key in kwargs}
    values, _ = cls.config_class.get_config_dict(config or source, **hub)
    return {"memory_positions": [], **values}


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
    if revision := kwargs.get("revision"):
        api.create_branch(repo_id=repo, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        allow_patterns=sorted(set(files)),
        commit_message=commit_message or "Upload model",
        **kwargs,
    )

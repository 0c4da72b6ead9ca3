"""What every trial of a study shares: the base, the tokens and the texts, each loaded once."""

import copy
import gc
import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from midus.config import UpscaleConfig
from midus.data.documents import read_documents
from midus.data.encoding import read_encoding
from midus.data.ids import read_ids
from midus.data.options import SourceOptions
from midus.data.tokens import TokenDataset, TokenFolder
from midus.errors import MidusError
from midus.models.fingerprint import fingerprint
from midus.models.loading import checked_device, load_model, load_tokenizer
from midus.models.sources import cache_folder, resolve_source
from midus.models.weights import Weights
from midus.reports import write_json
from midus.studies.locks import is_held
from midus.studies.trials import hash_facts
from midus.training.options import TrainOptions
from midus.training.starting import record_base, settle_model
from midus.upscaling import upscale, upscale_checkpoint
from midus.upscaling.method import Track

# Methods that solve a problem of their own for minutes before anything is trained.
SLOW = ("opt_deus", "lesa")
# Of the slow ones, those whose blocks do not depend on the seed.
_SEEDLESS = ("opt_deus",)
# Of a config, what it is called and by whom it was written, a base's own base included.
_NAMES = ("transformers_version", "id", "revision", "licence")


@dataclass(frozen=True)
class Text:
    """A text that is read after training."""

    ids: Tensor
    num_words: int


class Material:
    """The base on the CPU, tokens on the device, texts, and what identifies each of them.

    Args:
        model: The base, as `midus train` takes it.
        tokens: Token folder with the splits ``train``, ``held_out`` and ``test``.
        texts: Other texts by name.
    """

    def __init__(self, model: str, tokens: str, texts: dict[str, str]) -> None:
        self.source = model
        self.device = torch.device(checked_device(None))
        self.folder = TokenFolder(tokens)
        for split, share in (("held_out", "--held-out"), ("test", "--test")):
            if not self.folder.num_tokens(split):
                raise MidusError(
                    f"{tokens} has no {split} tokens; build it with midus data build {share} 0.02"
                )
        if self.folder.tokenizer_sha256 != read_encoding(model).sha256:
            other = self.folder.manifest["tokenizer"]["source"]
            raise MidusError(
                f"{tokens} was made with the tokenizer of {other}, which is not the one of "
                f"{model}; build it again with --tokenizer {model}"
            )
        self.base = load_model(model, device="cpu")
        tokenizer = load_tokenizer(model) if texts else None
        self.texts = {name: _read_text(path, tokenizer) for name, path in texts.items()}
        weights = Weights.open_folder(resolve_source(model))
        tied = self.base.config.tie_word_embeddings
        files = self.folder.manifest["splits"]
        self.facts: dict[str, Any] = {
            "base": fingerprint(weights, tied, every_element=True),
            "config": hash_facts(_meaning(self.base.config.to_dict())),
            "tokens": {
                split: [file["sha256"] for file in files[split]["files"]]
                for split in ("train", "held_out", "test")
            },
            "texts": {name: _digest(text.ids) for name, text in self.texts.items()},
        }
        self.identity = hash_facts(self.facts)
        self._sequences: dict[tuple[str, int, int | None], Tensor] = {}

    def sequences(self, split: str, seq_len: int, max_tokens: int | None = None) -> Tensor:
        """Sequences of a split on the device, ``[S, seq_len]``, kept for the next trial."""
        key = (split, seq_len, max_tokens)
        if key not in self._sequences:
            dataset = TokenDataset(self.folder, split, seq_len, max_tokens)
            rows = [dataset[row]["input_ids"].int() for row in range(len(dataset))]
            self._sequences = {k: v for k, v in self._sequences.items() if k[0] != split}
            self._sequences[key] = torch.stack(rows).to(self.device)
        return self._sequences[key]

    def start(self, options: TrainOptions, track: Track = lambda items, _: items) -> Any:
        """A model of its own for a trial: grown or not, frozen and cast as the options say."""
        if options.upscale is None or options.control != "none":
            model = copy.deepcopy(self.base)
        elif options.upscale.method in SLOW:
            model = self._grown_once(options.upscale, track)
        else:
            # The grown model shares what it freezes, so it must not share it with other trials.
            model = upscale(copy.deepcopy(self.base), options.upscale, track)
            record_base(model.config, self.source)
        model, _ = settle_model(model, options)
        return model.to(self.device)

    def release(self) -> None:
        """Frees what a trial held: models whose forward was replaced refer to themselves."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_being_grown(self, options: TrainOptions) -> bool:
        """Whether another process makes the blocks that `start` would have to wait for."""
        if options.upscale is None or options.control != "none":
            return False
        if options.upscale.method not in SLOW:
            return False
        folder, _ = self._grown(options.upscale)
        return not (folder / "config.json").is_file() and is_held(Path(f"{folder}.lock"))

    def _grown(self, config: UpscaleConfig) -> tuple[Path, dict[str, Any]]:
        """Where a model grown by a slow method is kept, and what it is made from."""
        base = {name: self.facts[name] for name in ("base", "config")}
        facts = {**base, "upscale": asdict(_seedless(config))}
        return cache_folder() / "grown" / hash_facts(facts), facts

    def _grown_once(self, config: UpscaleConfig, track: Track) -> Any:
        """Grown by a slow method, kept as a delta in midus' cache for the trials to come."""
        folder, facts = self._grown(config)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # other processes may want the same
            if not (folder / "config.json").is_file():
                upscale_checkpoint(self.source, folder, _seedless(config), delta=True, track=track)
                write_json(folder.with_suffix(".json"), facts)
        return load_model(folder, base=self.source, device="cpu")


def _seedless(config: UpscaleConfig) -> UpscaleConfig:
    return replace(config, seed=0) if config.method in _SEEDLESS else config


def _read_text(path: str, tokenizer: Any) -> Text:
    if not Path(path).expanduser().is_file():
        raise MidusError(f"texts: {path} does not exist; give a .txt or .jsonl file")
    words = sum(len(text.split()) for text, _ in read_documents(SourceOptions(path=path)))
    if not words:
        raise MidusError(f"texts: {path} holds no words; give a text")
    return Text(read_ids(path, tokenizer), words)


def _meaning(config: Any) -> Any:
    """A config without what it is called, where it lies and who wrote it."""
    if not isinstance(config, dict):
        return config
    return {
        str(key): _meaning(value)
        for key, value in config.items()
        if not str(key).startswith("_") and key not in _NAMES
    }


def _digest(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()

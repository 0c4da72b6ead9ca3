"""What a fine-tuning of finalists is: one set of options and one set of rows for every model."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from midus.data import read_instructions
from midus.errors import MidusError
from midus.models.loading import load_tokenizer
from midus.reports import write_json
from midus.studies.finalists import Finalist
from midus.studies.results import RESULTS_NAME
from midus.studies.trials import hash_facts
from midus.training.arguments import make_arguments
from midus.training.continuing import changed_option, deciding_options
from midus.training.options import TrainOptions
from midus.training.reading import read_yaml

FOLDER = "sft"
FACTS_NAME = "sft.json"
# Options with the value that leaves every model as many steps, and all of its weights to train.
_NEUTRAL = {
    "keep_best": (False, "models would end after different steps"),
    "early_stopping_patience": (None, "models would end after different steps"),
    "load_in_4bit": (False, "all weights train"),
    "sharding": ("none", "models are fine-tuned in one process"),
}


@dataclass(frozen=True)
class Sft:
    """One fine-tuning, the same for every model."""

    name: str
    options: dict[str, Any]
    """As it was begun; model and output are each model's own."""
    rows: str
    """Stands for the rows of instructions, training and held out."""

    def key(self, finalist: Finalist) -> str:
        """A hash of all that decides what becomes of a model."""
        options = deciding_options(_anywhere(self.options))
        return hash_facts({"options": options, "rows": self.rows, "model": finalist.key})


def read_sft_options(path: Path, settings: list[str], base: str) -> TrainOptions:
    """The options of a file of `midus train`, whose model and output are replaced.

    Args:
        path: A YAML file of stage sft.
        settings: ``a.b=value`` overrides.
        base: The study's base, in place of the model.
    """
    values = read_yaml(path, settings, "stage: sft")
    if values.get("stage") != "sft":
        raise MidusError(
            f"{path}: stage={values.get('stage')!r} is no fine-tuning; give a file of stage sft"
        )
    for name in ("upscale", "control"):
        if values.get(name) not in (None, "none"):
            raise MidusError(
                f"{path}: {name} is for a model that is to grow, and those of a study have grown "
                "already; leave it out"
            )
    try:
        options = TrainOptions.from_dict({**values, "model": base, "output": "(study)"})
    except MidusError as error:
        raise MidusError(f"{path}: {error}") from error
    if options.optimizer.parts:
        raise MidusError(
            f"{path}: optimizer.parts would tune models with memories alone, and the rates are the "
            "same for all; leave it out"
        )
    if options.optimizer.relative_lr is not None:
        raise MidusError(
            f"{path}: optimizer.relative_lr would be another rate for every model, and the rates "
            "are the same for all; give optimizer.lr instead"
        )
    if options.trainer.get("ignore_data_skip"):
        raise MidusError(
            f"{path}: trainer.ignore_data_skip would give a run that was stopped other rows; leave "
            "it out"
        )
    for name, (neutral, why) in _NEUTRAL.items():
        if getattr(options, name) != neutral:
            raise MidusError(f"{path}: {name} is not for finalists, as {why}; leave it out")
    if "save_strategy" in options.trainer:
        raise MidusError(
            f"{path}: trainer.save_strategy is said elsewhere, as every run is saved at its end; "
            "leave it out"
        )
    if options.trainable == "inserted":
        raise MidusError(
            f"{path}: trainable='inserted' leaves the base nothing to train; leave it out, and all "
            "weights of every model train"
        )
    if not options.data.held_out and not options.data.eval_sources:
        raise MidusError(
            f"{path}: models are compared by their held-out loss; set data.held_out or "
            "data.eval_sources"
        )
    options = replace(options, optimizer=options.optimizer.resolved("sft"))
    try:
        make_arguments(options, has_held_out=True)  # which refuses what the trainer would
    except MidusError as error:
        raise MidusError(f"{path}: {error}") from error
    return options


def describe_sft(name: str, options: TrainOptions) -> Sft:
    """A fine-tuning of that name with these options, which may take a while: rows are read."""
    return Sft(name, options.to_dict(), _digest_rows(options))


def begin_sft(folder: Path, sft: Sft, is_shared: bool) -> None:
    """A fine-tuning in a study's folder, begun or gone on with.

    Args:
        folder: Of the study.
        sft: What every model gets.
        is_shared: Whether others are at work there, who may have begun with something.

    Raises:
        MidusError: Where it was begun with other options or other rows.
    """
    out = folder / FOLDER / sft.name
    if not (out / FACTS_NAME).is_file() or not (is_shared or _has_come_far(out)):
        write_json(out / FACTS_NAME, {"options": sft.options, "rows": sft.rows})
        return
    begun = read_sft(folder, sft.name)
    if changed := changed_option(_anywhere(begun.options), _anywhere(sft.options)):
        option, before, now = changed
        raise MidusError(
            f"{out} was begun with {option}={before!r} and not {now!r}, and its models are "
            "compared with each other; give the same options, or another --name"
        )
    if begun.rows != sft.rows:
        raise MidusError(
            f"{out} was begun with other rows of instructions, and its models are compared with "
            "each other; give the same data, or another --name"
        )


def _has_come_far(out: Path) -> bool:
    """Whether there is something that other options would not fit: a row, or trained weights."""
    results = out / RESULTS_NAME
    has_rows = results.is_file() and results.stat().st_size > 0
    return has_rows or any(out.glob("*/checkpoint-*"))


def read_sft(folder: Path, name: str) -> Sft:
    """The fine-tuning of that name as it was begun."""
    path = folder / FOLDER / name / FACTS_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Sft(name, dict(values["options"]), str(values["rows"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MidusError(f"{path} cannot be read ({error}); give another --name") from error


def checked_name(name: str) -> str:
    """A name that is one folder."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise MidusError(f"name={name!r} must be the name of a folder, without a path")
    return name


def _anywhere(options: dict[str, Any]) -> dict[str, Any]:
    """Without what may lie elsewhere: a model goes by its trial, and rows by their contents."""
    return {**options, "model": "its own", "data": {}}


def _digest_rows(options: TrainOptions) -> str:
    """Of every row in its order; reading them also refuses bad data before anything runs."""
    found = read_instructions(options.data, load_tokenizer(options.model))
    if found.held_out is None:
        raise MidusError(
            "no row is held out, and models are compared by their held-out loss; raise "
            "data.held_out"
        )
    digest = hashlib.sha256()
    for split in (found.train, found.held_out):
        digest.update(json.dumps(split.to_list(), sort_keys=True).encode())
    return digest.hexdigest()

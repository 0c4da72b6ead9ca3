"""Which models of a study are fine-tuned: its base, and every final model that it kept."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from midus.errors import MidusError
from midus.models.atomic import CONFIG_NAME, atomic_folder
from midus.models.configuration import read_config
from midus.models.loading import ADAPTER_NAME, load_model, load_tokenizer
from midus.models.record import base_of, is_delta
from midus.models.sources import source_id
from midus.studies.choosing import choose, final_rows
from midus.studies.grid import search_trials
from midus.studies.material import Material
from midus.studies.options import StudyOptions
from midus.studies.results import Row, is_done, read_results
from midus.studies.trials import UNTOUCHED, base_key
from midus.training.checkpoint import write_weights
from midus.training.controls import check_control


@dataclass(frozen=True)
class Finalist:
    """A model that has been trained, or the base that has not."""

    method: str
    label: str
    """The method's name in tables."""
    seed: int | None
    """Of its training in the study; None for the base."""
    source: str
    """What `midus train` takes as ``model``; a folder of adapters is merged first."""
    key: str
    """Of its trial in the study, which stands for its weights."""
    row: Row
    """How it did in the study."""

    @property
    def name(self) -> str:
        """A name of its own, as a folder can have it; another setting chosen is another name."""
        seed = [] if self.seed is None else [str(self.seed)]
        digits = self.key.rpartition("-")[2][:8]  # the base's key has a word before them
        return "-".join([quote(self.method, safe=""), *seed, digits])

    @property
    def said(self) -> str:
        return self.label if self.seed is None else f"{self.label}, seed {self.seed}"


def find_finalists(folder: Path, study: StudyOptions, identity: str) -> list[Finalist]:
    """The base, then every final model that was kept, method by method.

    Args:
        folder: Of the study.
        study: What the folder holds.
        identity: What it was made with.
    """
    rows = read_results(folder)
    first = search_trials(study)[0].options
    key = base_key(first, identity)
    base = Finalist(UNTOUCHED, "the base", None, first.model, key, rows.get(key, {}))
    kept = []
    for name, method in study.methods.items():
        choice = choose(study, identity, rows, name)
        for trial, row in final_rows(study, identity, rows, choice) if choice else []:
            if row and is_done(row) and row.get("model"):
                source = str(folder / row["model"])
                own = (trial.seed, source, trial.key(identity), row)
                kept.append(Finalist(name, method.label or name, *own))
    if not kept:
        raise MidusError(
            f"{folder} has kept no final model; set keep: true for the methods to fine-tune and "
            "run the study again"
        )
    return [base, *kept]


def select_finalists(
    finalists: list[Finalist], only: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Finalist]:
    """Those of some methods and seeds; the base has no seed and is called ``untouched``."""
    methods = list(dict.fromkeys(finalist.method for finalist in finalists))
    for name in only:
        if name not in methods:
            raise MidusError(
                f"the study has kept no model of method {name!r}; choose from {', '.join(methods)}"
            )
    known = sorted({finalist.seed for finalist in finalists if finalist.seed is not None})
    for seed in seeds:
        if seed not in known:
            raise MidusError(
                f"the study has kept no model of seed {seed}; choose from "
                f"{', '.join(map(str, known))}"
            )
    return [
        finalist
        for finalist in finalists
        if (not only or finalist.method in only)
        and (not seeds or finalist.seed is None or finalist.seed in seeds)
    ]


def check_kept(finalists: list[Finalist]) -> None:
    """Refuses models that are not where the study has left them, before anything runs."""
    for finalist in finalists:
        folder = Path(finalist.source)
        if finalist.seed is None:
            continue
        if not folder.is_dir():
            raise MidusError(
                f"{folder}, the model of {finalist.said}, is not there; bring it back, or run the "
                "study again, which trains it once more"
            )
        if _is_adapter(folder):
            check_control("lora")


def starting_source(finalist: Finalist, material: Material, merged: Path) -> str:
    """What a run starts from: the model as it was kept, or whole where it is not on its own.

    Adapters are merged into the base in float32: in a narrower type small changes would be rounded
    away. A delta whose base has moved since is put together with it as it is.

    Args:
        finalist: Which model.
        material: Of the study; its base is left as it is.
        merged: Where a whole model is written, unless it is there.
    """
    folder = Path(finalist.source)
    if finalist.seed is None or not (_is_adapter(folder) or _lost_base(folder, material.source)):
        return finalist.source
    if not (merged / CONFIG_NAME).is_file():
        if _is_adapter(folder):
            model = _merged(copy.deepcopy(material.base).float(), folder)
        else:
            model = load_model(folder, base=material.source, device="cpu")
        with atomic_folder(merged, overwrite=True) as work:
            tokenizer = load_tokenizer(material.source)
            write_weights(model, work, delta=False, keep=True, tokenizer=tokenizer)
    return str(merged)


def _merged(base: Any, folder: Path) -> Any:
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    except Exception as error:  # a damaged file fails in as many ways as PEFT has steps
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MidusError(f"{folder} cannot be merged into the base ({reason})") from error


def _lost_base(folder: Path, base: str) -> bool:
    """Whether it is a delta that looks for its base where the study's is not."""
    config = read_config(folder)
    return is_delta(config) and base_of(config).get("id") != source_id(base)


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_NAME).is_file()

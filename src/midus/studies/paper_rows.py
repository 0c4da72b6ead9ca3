"""Which of a study's runs the paper has too: by what a run is, not by what a grid calls it."""

import functools
import json
import statistics
from dataclasses import replace
from typing import Any

from midus.config import MemoryConfig, UpscaleConfig
from midus.studies.figures import Line
from midus.studies.options import StudyOptions
from midus.studies.paper_ablations import PaperAblation
from midus.studies.results import Row, is_done
from midus.studies.trials import Trial
from midus.training.options import TrainOptions
from midus.upscaling.methods import find_method

HML = "MIDUS-HML"
# As `midus.evaluation.paper` has them.
_METHODS = {
    "base": "Base",
    "solar": "SOLAR",
    "llama_pro": "Llama Pro",
    "lesa": "LESA",
    "opt_deus": "OpT-DeUS",
    "avg_deus": "Avg-DeUS",
}
_MEMORIES = {"hml": HML, "linear": "Linear", "pkm": "PKM", "ultramem": "UltraMem"}
# Of a memory's start the paper gives the zero table alone.
_STARTS = ("key_init", "value_proj_init", "key_scale", "value_proj_scale")

Searched = list[tuple[Trial, Row | None]]


def paper_name(options: TrainOptions) -> str | None:
    """What the paper calls a run; None for one it has not.

    Rates and starts may differ; the method, its sizes, its structure and its optimizer may not.
    """
    if (options.control, options.key_start, options.trainable) != ("none", "random", "auto"):
        return None
    optim = str(options.trainer.get("optim", "adamw"))
    if options.optimizer.matrices != "adamw" or not optim.startswith("adamw"):
        return None
    own = options.upscale
    if own is None:
        return _METHODS["base"]
    starts = {name: getattr(own.memory, name) for name in _STARTS}
    default = find_method(own.method).default_placement
    published = UpscaleConfig(
        method=own.method,
        memory=replace(MemoryConfig(kind=own.memory.kind), **starts),
        seed=own.seed,
        placement=own.placement if own.placement == default else None,
    )
    if own != published:
        return None
    return _MEMORIES.get(own.memory.kind) if own.method == "midus" else _METHODS.get(own.method)


def ablated(
    study: StudyOptions, searched: Searched, name: str, ablation: PaperAblation
) -> tuple[dict[tuple[Any, ...], Line], list[str]]:
    """The settings of a method that vary what a table of the paper varies, and what has no figure.

    Nothing where the method is not the paper's MIDUS-HML but for that. Where rates are searched
    besides, a setting is shown at its best one, as validation has it.

    Args:
        study: The study.
        searched: The trials of its search, with rows where they have ended.
        name: The method.
        ablation: The paper's table.
    """
    method = study.methods[name]
    varied = set(method.vary) - set(study.search if method.search is None else method.search)
    options = varied.intersection(ablation.options)
    own = [
        (trial, row)
        for trial, row in searched
        if trial.method == name and varied.intersection(trial.varied) <= options
    ]
    centre = [trial for trial, _ in own if not varied.intersection(trial.varied)]
    if not options or any(paper_name(trial.options) != HML for trial in centre):
        return {}, []
    groups: dict[tuple[Any, ...], Searched] = {}
    for trial, row in own:
        groups.setdefault(_values(trial, ablation), []).append((trial, row))
    lines, missing = {}, []
    for values, group in groups.items():
        trial = group[0][0]
        alone = {key: value for key, value in trial.varied.items() if key in varied}
        label = replace(trial, varied=alone).setting
        if not alone:
            label = method.label or name
            if len(values) == 1:
                said = replace(trial, varied=dict(zip(ablation.options, values, strict=True)))
                label += f", {said.setting}"
        rows = _best(group)
        if rows:
            lines[values] = Line(label, None, rows, len(rows))
        else:
            missing.append(label)
    return lines, missing


def _values(trial: Trial, ablation: PaperAblation) -> tuple[Any, ...]:
    found = [functools.reduce(getattr, o.split("."), trial.options) for o in ablation.options]
    default = find_method("midus").default_placement
    return tuple(
        default if option == "upscale.placement" and value is None else value
        for option, value in zip(ablation.options, found, strict=True)
    )


def _best(group: Searched) -> list[Row]:
    """Rows of the setting with the lowest validation loss; none while trials are left."""
    settings: dict[str, list[Row]] = {}
    for trial, row in group:
        if row is None:
            return []
        settings.setdefault(json.dumps(trial.varied), []).append(row)
    done = [rows for rows in settings.values() if all(map(is_done, rows))]
    return min(
        done, key=lambda rows: statistics.mean(r["validation"]["loss"] for r in rows), default=[]
    )

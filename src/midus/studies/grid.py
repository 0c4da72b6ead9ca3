"""A study as the list of its trials."""

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from midus.errors import MidusError
from midus.studies.checking import refuse_ignored, refuse_own
from midus.studies.fairness import check_fair, check_lengths
from midus.studies.options import MethodOptions, StudyOptions
from midus.studies.trials import Trial
from midus.training.options import TrainOptions
from midus.training.reading import set_option
from midus.training.recipes import with_recipe


def search_trials(study: StudyOptions) -> list[Trial]:
    """Every trial of the search, method by method.

    Where a method has one setting, nothing is chosen: its trials of final seeds are final ones.
    """
    trials: list[Trial] = []
    for name, method in study.methods.items():
        settings = list(_settings(study, method))
        finals = study.final_seeds if len(settings) == 1 and study.final_tokens is None else []
        trials += [
            make_trial(study, name, varied, seed, is_final=seed in finals)
            for varied in settings
            for seed in study.seeds
        ]
    check_fair(study, trials)
    check_lengths(study, trials)
    return trials


def final_trials(study: StudyOptions, name: str, varied: dict[str, Any]) -> list[Trial]:
    """A method's chosen setting with the final seeds, as long as final trials are."""
    return [make_trial(study, name, varied, seed, is_final=True) for seed in study.final_seeds]


def lengths(study: StudyOptions) -> tuple[int, int] | None:
    """Tokens of a trial of the search and of a final one, where the two differ."""
    if study.final_tokens is None:
        return None
    name, method = next(iter(study.methods.items()))
    varied = next(_settings(study, method))
    search, final = (make_trial(study, name, varied, 0, is_final=i).tokens for i in (False, True))
    return None if search == final else (search, final)


def count_finals(study: StudyOptions) -> tuple[int, int]:
    """The fewest and the most trials there may be after the search.

    Kept methods may be among the best, and trials of the search may be final ones already.
    """
    ended = Counter(trial.method for trial in search_trials(study) if trial.is_final)
    left = {name: len(study.final_seeds) - ended[name] for name in study.methods}
    kept = [left[name] for name, method in study.methods.items() if method.keep]
    others = sorted(left[name] for name, method in study.methods.items() if not method.keep)
    best = len(left) if study.finalists is None else study.finalists
    fewest = others[: max(0, best - len(kept))]
    most = others[max(0, len(others) - best) :]
    return sum(kept) + sum(fewest), sum(kept) + sum(most)


def make_trial(
    study: StudyOptions, name: str, varied: dict[str, Any], seed: int, is_final: bool = False
) -> Trial:
    """One trial: what all have, what the method is, what is varied, the seed, and how long."""
    said = f"methods.{name}"
    values = copy.deepcopy(study.run)
    own = _flat(study.methods[name].set)
    refuse_own("run", _flat(values))
    refuse_own(f"{said}.set", own)
    refuse_own("search", _flat(varied))
    values |= {"stage": "cpt", "output": "(study)", "seed": seed}
    for option, value in {**own, **varied}.items():
        set_option(values, option, copy.deepcopy(value), said)
    if is_final and study.final_tokens is not None:
        set_option(values, "data.max_tokens", study.final_tokens, said)
    try:
        values = with_recipe(values)  # which may be where it grows
        if isinstance(values.get("upscale"), dict):
            values["upscale"]["seed"] = seed
        options = TrainOptions.from_dict(values)
        options = replace(options, optimizer=options.optimizer.resolved("cpt"))
        options = _with_steps(options)
        refuse_ignored(options)
    except MidusError as error:
        raise MidusError(f"{said}: {error}") from error
    keep = is_final and study.methods[name].keep
    return Trial(name, varied, seed, options, is_final, keep)


def _settings(study: StudyOptions, method: MethodOptions) -> Iterator[dict[str, Any]]:
    search = study.search if method.search is None else method.search
    apart: list[dict[str, Any]] = [{}]
    apart += [{name: value} for name, values in method.vary.items() for value in values]
    for alone in apart:
        for values in itertools.product(*search.values()):
            yield {**dict(zip(search, values, strict=True)), **alone}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dots, so that each one replaces one option and not a whole section."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _with_steps(options: TrainOptions) -> TrainOptions:
    """With as many steps as the tokens make: trials are equal in tokens."""
    if "max_steps" in options.trainer or "num_train_epochs" in options.trainer:
        raise MidusError(
            "trainer.max_steps and num_train_epochs follow from data.max_tokens; leave them out"
        )
    if options.data.max_tokens is None:
        raise MidusError("data.max_tokens is missing; say how many tokens every trial reads")
    steps = options.data.max_tokens // (options.batch_size * options.data.seq_len)
    if not steps:
        raise MidusError(
            f"data.max_tokens={options.data.max_tokens} is less than one step of "
            f"{options.batch_size} sequences of {options.data.seq_len}; raise it"
        )
    return replace(options, trainer={**options.trainer, "max_steps": steps})

"""What makes trials comparable: as many for every method, and equal in all that is not compared."""

from dataclasses import fields, replace
from typing import Any

from midus.errors import MidusError
from midus.studies.options import StudyOptions
from midus.studies.trials import Trial
from midus.training.options import TrainOptions


def check_fair(study: StudyOptions, trials: list[Trial]) -> None:
    """Refuses a search that would favour a method, unless the study says it compares nothing."""
    _refuse_repeated(trials)
    if not study.equal_trials:
        return
    counts = count_trials(trials)
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[least] != counts[most]:
        raise MidusError(
            f"{most} has {counts[most]} trials and {least} has {counts[least]}, which favours the "
            f"first; give both as many, or set equal_trials: false"
        )
    found = differences(trials)
    if found:
        raise MidusError(
            f"trials differ in {', '.join(found)}, which would compare that; say it once, under "
            "run, or set equal_trials: false"
        )


def check_lengths(study: StudyOptions, trials: list[Trial]) -> None:
    """Refuses final runs of no step, and a final round after searches of several lengths."""
    for name in ("final_tokens", "finalists"):
        if getattr(study, name) is not None and len({trial.tokens for trial in trials}) > 1:
            raise MidusError(
                f"{name} needs a search whose trials are of one length, and these differ in the "
                f"tokens they read; say data.max_tokens once, under run, or leave {name} out"
            )
    for options in (trial.options for trial in trials):
        a_step = options.batch_size * options.data.seq_len
        if study.final_tokens is not None and study.final_tokens < a_step:
            raise MidusError(
                f"final_tokens={study.final_tokens} is less than one step of "
                f"{options.batch_size} sequences of {options.data.seq_len}; raise it"
            )


def count_trials(trials: list[Trial]) -> dict[str, int]:
    """Trials of each method."""
    methods = [trial.method for trial in trials]
    return {name: methods.count(name) for name in methods}


def differences(trials: list[Trial]) -> list[str]:
    """What differs among trials that a comparison needs equal."""
    shared = [_shared(trial.options, trial.tokens) for trial in trials]
    return [name for name, value in shared[0].items() if any(own[name] != value for own in shared)]


def _shared(options: TrainOptions, tokens: int) -> dict[str, Any]:
    return {
        **{f"data.{f.name}": getattr(options.data, f.name) for f in fields(options.data)},
        "batch_size": options.batch_size,
        "precision": options.precision,
        "tokens read": tokens,
    }


def _refuse_repeated(trials: list[Trial]) -> None:
    """A setting that stands twice, as 0.001 and 1.0e-3, would count as two."""
    seen: list[tuple[str, TrainOptions]] = []
    for trial in trials:
        facts = (trial.method, replace(trial.options, cuda_graphs=True))
        if facts in seen:
            raise MidusError(
                f"methods.{trial.method} has two trials with the same options "
                f"({trial.setting or 'as it is'}, seed {trial.seed}); name each setting once"
            )
        seen.append(facts)

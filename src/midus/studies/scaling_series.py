"""A study's results as series: loss against slots or tokens, all else equal."""

import itertools
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.memory.ultramem import EXPANSION
from midus.studies.results import RESULTS_NAME, Row, is_done, read_results
from midus.studies.trials import UNTOUCHED
from midus.training.options import TrainOptions

AXES = ("slots", "tokens")
# What may differ within a series: the axis, the seed, what follows from them, and where things lie.
_AXIS_OPTIONS = {"slots": "upscale.memory.num_subkeys", "tokens": "data.max_tokens"}
_FREE = ("seed", "upscale.seed", "output", "model", "data.sources", "cuda_graphs")
_STEPS = "trainer.max_steps"


@dataclass(frozen=True)
class Point:
    """The validation loss of one run, or of one point of its curve."""

    x: float
    loss: float
    seed: int
    trainable: int


@dataclass
class Series:
    """Runs of one method that differ in the axis and the seed alone."""

    method: str
    facts: dict[str, Any]
    """Every other option, by name."""
    identity: str
    """Of base, tokens and texts: series with another one are not comparable."""
    points: list[Point] = field(default_factory=list)
    setting: str = ""
    """Where it differs from the method's other series."""
    spread: float | None = None
    """Standard deviation over seeds at one x, of this series or else of the whole study."""

    @property
    def label(self) -> str:
        return f"{self.method}, {self.setting}" if self.setting else self.method

    @property
    def places(self) -> list[float]:
        """Every x once, in order."""
        return sorted({point.x for point in self.points})

    @property
    def seeds(self) -> list[int]:
        """Those that every x has; where there is none, all."""
        # Another seed is another order of data, which must not count as a step along the axis.
        own = [{p.seed for p in self.points if p.x == x} for x in self.places]
        return sorted(set.intersection(*own) or set.union(*own))

    def fitted(self) -> list[Point]:
        """The points that a fit goes through, in order."""
        seeds = self.seeds
        return sorted((p for p in self.points if p.seed in seeds), key=lambda p: (p.x, p.seed))

    def means(self) -> list[float]:
        """Mean loss at each x, over the seeds of the fit."""
        grouped = itertools.groupby(self.fitted(), key=lambda point: point.x)
        return [statistics.mean(point.loss for point in own) for _, own in grouped]


def read_series(out: Path, over: str, curves: bool = False) -> tuple[list[Series], int]:
    """Every series of a study's folder, and how many of its trials failed.

    Args:
        out: The folder.
        over: ``slots`` (a head's, N = n²) or ``tokens``.
        curves: Take the points inside each run instead of the ends of runs; tokens only.
    """
    rows = [row for row in read_results(out).values() if row["method"] != UNTOUCHED]
    if not rows:
        raise MidusError(
            f"{out / RESULTS_NAME} is missing or has no trial; make one with: midus study run "
            f"studies/scaling.yaml --out {out}"
        )
    found: dict[str, Series] = {}
    done = [row for row in rows if is_done(row)]
    for row in done:
        try:
            points = _curve_points(row) if curves else _end_points(row, over)
            facts = _facts(row, over, curves)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MidusError(
                f"{out / RESULTS_NAME}: the row of {row['method']} with key {row.get('key')!r} is "
                f"not as a study writes it ({type(error).__name__}: {error}); remove its line"
            ) from error
        if not points:
            continue
        key = f"{row['method']} {sorted(facts.items())}"
        series = found.setdefault(key, Series(row["method"], facts, str(row["identity"])))
        series.points += points
    _name_settings(list(found.values()))
    _add_spreads(list(found.values()))
    return list(found.values()), len(rows) - len(done)


def _end_points(row: Row, over: str) -> list[Point]:
    x = _slots(row) if over == "slots" else row.get("tokens")
    loss = float(row["validation"]["loss"])
    return [Point(float(x), loss, row["seed"], row["trainable"])] if x else []


def _curve_points(row: Row) -> list[Point]:
    return [
        Point(float(point["tokens"]), point["validation_loss"], row["seed"], row["trainable"])
        for point in row.get("curve", [])
        if point["validation_loss"] is not None
    ]


def _slots(row: Row) -> int | None:
    """A head's slots in every memory block; None where nothing of it is a memory."""
    grown = row["options"].get("upscale") or {}
    if grown.get("method") != "midus" or row["options"].get("control", "none") != "none":
        return None
    memory = grown["memory"]
    return int(memory["num_subkeys"]) ** 2 * (EXPANSION if memory["kind"] == "ultramem" else 1)


def _facts(row: Row, over: str, curves: bool) -> dict[str, Any]:
    """What all runs of a series have in common; whole curves keep the length of their run."""
    facts = {"base and data": str(row["identity"])[:8], **_flat(_options(row))}
    free = [*_FREE, _AXIS_OPTIONS[over]]
    if curves:
        free.remove(_AXIS_OPTIONS["tokens"])
    return {name: value for name, value in facts.items() if name not in (*free, _STEPS)}


def _options(row: Row) -> dict[str, Any]:
    """A row's options with the defaults of those that are younger than it."""
    options: dict[str, Any] = row["options"]
    try:
        return TrainOptions.from_dict(options).to_dict()
    except (ValueError, TypeError):  # an option that is no more
        return options


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value) if isinstance(value, list) else value
    return flat


def _name_settings(series: list[Series]) -> None:
    """Names each by the options in which the series of its method differ."""
    for method in {one.method for one in series}:
        own = [one for one in series if one.method == method]
        names = {name: None for one in own for name in one.facts}
        differing = [name for name in names if len({repr(one.facts.get(name)) for one in own}) > 1]
        last = [name.rpartition(".")[2] for name in differing]
        shown = {
            name: word if last.count(word) == 1 else name
            for name, word in zip(differing, last, strict=True)
        }
        for one in own:
            said = [f"{shown[name]}={_said(one.facts.get(name))}" for name in differing]
            one.setting = ", ".join(said)


def _said(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _add_spreads(series: list[Series]) -> None:
    of_all = _spread(series)
    for one in series:
        own = _spread([one])
        one.spread = of_all if own is None else own


def _spread(series: list[Series]) -> float | None:
    """Standard deviation of seeds at one x, pooled; None where no x has two."""
    squares, degrees = 0.0, 0
    for one in series:
        for x in one.places:
            losses = [point.loss for point in one.points if point.x == x]
            degrees += len(losses) - 1
            squares += statistics.pvariance(losses) * len(losses)
    return math.sqrt(squares / degrees) if degrees else None

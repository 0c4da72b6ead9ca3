"""What one study is: a YAML file, key for key the dataclasses below.

What every trial has stands under ``run:``, in the words of `midus train`; what is compared, under
``methods:``; what every method may try, under ``search:``.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.studies.trials import UNTOUCHED
from midus.training.options import LARGEST_SEED, is_seed
from midus.training.reading import build_options, numeric, override_option, read_yaml

MEASURES = ("slots", "gradients", "rank", "gates")
PAPERS = ("general", "math")


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """One thing that is compared with the others."""

    label: str | None = None
    """Its name in tables; default: the key it stands under."""
    set: dict[str, Any] = field(default_factory=dict)
    """Options of `midus train` that make it what it is, nested or with dots."""
    search: dict[str, list[Any]] | None = None
    """What it tries instead of the study's search; every combination."""
    vary: dict[str, list[Any]] = field(default_factory=dict)
    """What it tries besides, one setting at a time; each with every combination of the search."""
    keep: bool = False
    """Keep the trained models of its final seeds, as deltas where the base is frozen."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not isinstance(self.label, str | None):
            raise MidusError(f"label={self.label!r} of a method must be a text")
        if not isinstance(self.set, dict):
            raise MidusError(f"set={self.set!r} of a method must be a mapping of options")
        if not isinstance(self.keep, bool):
            raise MidusError(f"keep={self.keep!r} of a method must be true or false")


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Benchmark tasks of the base and of every final model, as `midus eval` measures them."""

    suite: str | None = None
    """One of `midus eval`: wikitext, general, math, retrieval or longbench."""
    names: list[str] = field(default_factory=list)
    """Some of the suite's tasks, or any of the harness's without one; default: all of the suite."""
    data: str | None = None
    """Folder of local files, as --data-dir has them; default: the hub is read."""
    limit: int | None = None
    """Examples of each task, the first ones; default: all."""
    batch_size: int = 16
    """Rows of 512 tokens a batch, more shorter ones and fewer longer; halved where memory ends."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("suite", "data"):
            if not isinstance(getattr(self, name), str | None):
                raise MidusError(f"tasks.{name}={getattr(self, name)!r} must be a text")
        if not isinstance(self.names, list) or not all(isinstance(n, str) for n in self.names):
            raise MidusError(f"tasks.names={self.names!r} must be a list, such as [piqa]")
        if self.suite is None and not self.names:
            raise MidusError("tasks names nothing to measure; give suite, names or both")
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise MidusError(f"tasks.limit={self.limit!r} must be a positive whole number or null")
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise MidusError(
                f"tasks.batch_size={self.batch_size!r} must be a positive whole number"
            )


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """One run of `midus study`."""

    name: str
    """What the study is called in tables and pictures."""
    run: dict[str, Any]
    """Options of every trial, as in a file of `midus train`; data.max_tokens says how long."""
    methods: dict[str, MethodOptions]
    """What is compared, by name."""
    search: dict[str, list[Any]] = field(default_factory=dict)
    """Settings that every method tries, in every combination; the best one on validation counts."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the search: of the data's order and of all that is random; far from each other."""
    final_seeds: list[int] = field(default_factory=list)
    """Seeds that each method's best setting is trained with in the end; none: no final round."""
    final_tokens: int | None = None
    """Tokens that each trial of the final seeds reads; default: as many as those of the search."""
    finalists: int | None = None
    """How many methods go on to the final seeds, the best on validation; default: all.

    Methods with ``keep`` go on besides, whatever they reached.
    """
    equal_trials: bool = True
    """Refuse a study in which some methods try more settings than others."""
    texts: dict[str, str] = field(default_factory=dict)
    """Texts read after training, by name: what has been forgotten."""
    curve_points: int = 8
    """How often validation loss is taken: after all tokens, half of them, a quarter, and so on."""
    measure: list[str] = field(default_factory=list)
    """What else is measured: slots (their use), gradients (norms a part), rank (of V W_h), gates
    (every text with memory blocks turned down)."""
    tasks: TaskOptions | None = None
    """Benchmark tasks of the untouched base and of every final seed's model; default: none."""
    eval_batch_size: int = 16
    """Sequences of one forward pass in evaluation."""
    paper: str | None = None
    """Which order of the paper's the report puts beside this one: after general text, or math."""

    def __post_init__(self) -> None:
        """Check what needs neither model nor data."""
        self._check_kinds()
        if not self.methods:
            raise MidusError("methods is empty; name at least one to study")
        if UNTOUCHED in self.methods:
            raise MidusError(
                f"methods.{UNTOUCHED} has the name that rows of the base have; call it otherwise"
            )
        for name in ("seeds", "final_seeds"):
            values = getattr(self, name)
            if not _are_seeds(values):
                raise MidusError(
                    f"{name}={values!r} must be a list of whole numbers from 0 to {LARGEST_SEED}, "
                    "each once"
                )
        if not self.seeds:
            raise MidusError("seeds is empty; give at least one, such as [0]")
        for name in ("curve_points", "eval_batch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise MidusError(f"{name}={value!r} must be a positive whole number")
        for name in self.measure:
            if name not in MEASURES:
                raise MidusError(f"measure={name!r} is unknown; choose from {', '.join(MEASURES)}")
        if self.paper not in (None, *PAPERS):
            raise MidusError(f"paper={self.paper!r} is unknown; choose from {', '.join(PAPERS)}")
        if self.tasks and not self.final_seeds:
            raise MidusError("tasks are measured of final models; give final_seeds")
        self._check_final_round()
        _check_search("search", self.search)
        for name, method in self.methods.items():
            if method.keep and not self.final_seeds:
                raise MidusError(f"methods.{name}.keep keeps final models; give final_seeds")
            _check_search(f"methods.{name}.search", method.search or {})
            _check_search(f"methods.{name}.vary", method.vary)

    def _check_final_round(self) -> None:
        for name in ("final_tokens", "finalists"):
            value = getattr(self, name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise MidusError(f"{name}={value!r} must be a positive whole number or null")
            if not self.final_seeds:
                raise MidusError(f"{name}={value} is of the final round; give final_seeds")
        if self.finalists is not None and self.finalists > len(self.methods):
            raise MidusError(
                f"finalists={self.finalists} is more than the {len(self.methods)} methods there "
                "are; lower it, or leave it out for all"
            )

    def _check_kinds(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise MidusError(f"name={self.name!r} must be a text that is not empty")
        if not isinstance(self.equal_trials, bool):
            raise MidusError(f"equal_trials={self.equal_trials!r} must be true or false")
        if not isinstance(self.measure, list):
            raise MidusError(f"measure={self.measure!r} must be a list, such as [slots]")
        for name in ("run", "methods", "texts"):
            value = getattr(self, name)
            if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
                raise MidusError(f"{name}={value!r} must be a mapping by names in letters")
        for name, path in self.texts.items():
            if not isinstance(path, str):
                raise MidusError(f"texts.{name}={path!r} must be a file")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StudyOptions":
        """The options a mapping spells out; unknown and missing keys are errors."""
        options: StudyOptions = build_options(cls, numeric(values), "")
        return options

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_study(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> StudyOptions:
    """The study of a YAML file, with ``a.b=value`` overrides.

    ``like: other.yaml`` takes everything from another one, beside it: what both say counts as this
    one says it, mapping by mapping, and null takes something away.
    """
    values = _with_like(Path(path), ())
    for override in overrides:
        override_option(values, override)
    try:
        return StudyOptions.from_dict(values)
    except MidusError as error:
        raise MidusError(f"{path}: {error}") from error


def _with_like(path: Path, before: tuple[Path, ...]) -> dict[str, Any]:
    values = read_yaml(path, (), "name: my study")
    if "like" not in values:
        return values
    other = values.pop("like")
    if not isinstance(other, str):
        raise MidusError(f"{path}: like={other!r} must be a file beside it, such as math.yaml")
    seen = (*before, path.resolve())
    if (path.parent / other).resolve() in seen:
        raise MidusError(f"{path}: like={other!r} leads back to itself; name another study")
    try:
        return _merged(_with_like(path.parent / other, seen), values)
    except MidusError as error:
        raise MidusError(f"{path}: like: {error}") from error


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **own}
    for name in base.keys() & own.keys():
        if isinstance(base[name], dict) and isinstance(own[name], dict):
            merged[name] = _merged(base[name], own[name])
        elif own[name] is None:
            del merged[name]
    return merged


def _are_seeds(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    return all(map(is_seed, values)) and len(set(values)) == len(values)


def _check_search(name: str, search: Any) -> None:
    if not isinstance(search, dict) or not all(
        isinstance(name, str) and isinstance(values, list) and values
        for name, values in search.items()
    ):
        raise MidusError(f"{name}={search!r} must give each option a list of values")

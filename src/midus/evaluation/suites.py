"""What the paper measures, as data: tasks, shots, metric, and what is averaged.

Names, prompts and metrics are those of lm-evaluation-harness. The paper's numbers are `acc` (never
`acc_norm`), word perplexity, and plain means over tasks.
"""

from dataclasses import dataclass

from midus.errors import MidusError, suggest

PERPLEXITY = "word_perplexity"


@dataclass(frozen=True)
class Column:
    """One number of a suite: a metric of a task, or of a group of them taken together."""

    key: str
    """Its name in tables and files."""
    label: str
    """What the paper's table calls it."""
    metric: str
    """The harness's name for the metric."""
    folder: str
    """Where the harness keeps the task, under its own tasks folder."""
    tasks: str = ""
    """The harness's task, or a pattern of tasks taken together; default: the key."""
    filter: str = "none"
    """Which of the harness's answer filters."""
    shots: int = 0
    percent: bool = True
    """Whether it is a share, shown times 100."""
    higher_is_better: bool = True
    variant_of: str | None = None
    """For a task over other documents than the paper's: the column it stands in for."""

    @property
    def pattern(self) -> str:
        return self.tasks or self.key


@dataclass(frozen=True)
class Mean:
    """A plain mean over columns."""

    label: str
    over: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """Columns of one of the paper's tables, and their mean."""

    name: str
    about: str
    columns: tuple[Column, ...]
    average: Mean | None = None
    categories: tuple[Mean, ...] = ()


_LONGBENCH = {
    "Single-Doc QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-Doc QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summarization": ("gov_report", "qmsum", "multi_news"),
    "Few-shot": ("trec", "triviaqa", "samsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en"),
    "Code": ("lcc", "repobench-p"),
}

_WIKITEXT = Column(
    "wikitext", "Wiki", PERPLEXITY, "wikitext", percent=False, higher_is_better=False
)
_GENERAL = (
    Column("arc_easy", "ARC", "acc", "arc"),
    Column("logiqa", "LogiQA", "acc", "logiqa"),
    Column("winogrande", "Wino", "acc", "winogrande"),
    Column("commonsense_qa", "CSQA", "acc", "commonsense_qa"),
    Column("boolq", "BoolQ", "acc", "super_glue/boolq"),
    Column("piqa", "PIQA", "acc", "piqa"),
    Column("mmlu", "MMLU", "acc", "mmlu/default", "mmlu_*"),
)


def _exact_match(key: str, label: str, filter: str) -> Column:
    suffix = "" if filter == "strict-match" else " (flexible)"
    return Column(key + suffix, label + suffix, "exact_match", "gsm8k", key, filter=filter, shots=5)


_MATH_COLUMNS = (
    _exact_match("gsm8k", "GSM8K", "strict-match"),
    _exact_match("gsm8k", "GSM8K", "flexible-extract"),
    _exact_match("gsm8k_cot", "GSM8K-CoT", "strict-match"),
    _exact_match("gsm8k_cot", "GSM8K-CoT", "flexible-extract"),
    Column(
        "hendrycks_math",
        "MATH",
        "exact_match",
        "hendrycks_math",
        "hendrycks_math_*",
        shots=5,
    ),
    Column("mathqa", "MathQA", "acc", "mathqa", shots=5),
)
_RETRIEVAL = (
    Column("triviaqa", "TriviaQA", "exact_match", "triviaqa", filter="remove_whitespace", shots=5),
    Column("nq_open", "NQ-Open", "exact_match", "nq_open", filter="remove_whitespace", shots=5),
    Column("race", "RACE", "acc", "race", shots=5),
)
_LONGBENCH_COLUMNS = tuple(
    Column(f"longbench_{name}", name, "score", "longbench")
    for names in _LONGBENCH.values()
    for name in names
)


def _mean(label: str, columns: tuple[Column, ...]) -> Mean:
    return Mean(label, tuple(column.key for column in columns))


SUITES = {
    "wikitext": Suite("wikitext", "WikiText-2 word perplexity, page by page", (_WIKITEXT,)),
    "general": Suite(
        "general",
        "word perplexity and seven tasks at zero shots",
        (_WIKITEXT, *_GENERAL),
        _mean("Average", _GENERAL),
    ),
    "math": Suite(
        "math",
        "four tasks at five shots",
        _MATH_COLUMNS,
        Mean("Average", ("gsm8k", "gsm8k_cot", "hendrycks_math", "mathqa")),
    ),
    "retrieval": Suite(
        "retrieval", "three tasks at five shots", _RETRIEVAL, _mean("Average", _RETRIEVAL)
    ),
    "longbench": Suite(
        "longbench",
        "the 16 English tasks of LongBench",
        _LONGBENCH_COLUMNS,
        _mean("Overall", _LONGBENCH_COLUMNS),
        tuple(
            Mean(label, tuple(f"longbench_{name}" for name in names))
            for label, names in _LONGBENCH.items()
        ),
    ),
}


def find_suite(name: str) -> Suite:
    """The suite of that name."""
    if name not in SUITES:
        raise MidusError(f"suite={name!r} is unknown; {suggest(name, SUITES)}")
    return SUITES[name]

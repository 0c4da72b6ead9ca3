"""The sections on heads, slots and the theorem: pictures, and the numbers behind them."""

from pathlib import Path

from midus.report.collect import Collection
from midus.report.conditions import conditions_of
from midus.report.document import Content, Section
from midus.report.figures import embed_png
from midus.report.head_tables import head_tables
from midus.report.results import Result, reading
from midus.report.slot_tables import slot_tables
from midus.report.theorem_tables import theorem_tables

_TITLES = {
    "heads": "Head importance",
    "slots": "Memory slots",
    "theorem": "Shared and head-wise values: the theorem",
}
_ALTS = {
    "heads": "Head importance of every layer and head, and its variance over the heads of a layer",
    "slots": "Use of slots in every memory block: how many, how evenly, by which heads, how strong",
    "theorem": "Losses of shared, head-wise and HIVE values under fixed retrieval",
}


def analysis_sections(collection: Collection) -> list[Section]:
    """One section a kind, one child a result file; kinds without any are left out."""
    sections = []
    for kind, title in _TITLES.items():
        found: dict[int, tuple[Result, list[str]]] = {}
        for subject in collection.subjects:
            for result in subject.of_kind(kind):
                found.setdefault(id(result), (result, []))[1].append(subject.label)
        for result in collection.general:
            if result.kind == kind:
                found[id(result)] = (result, [])
        children = []
        for result, labels in found.values():
            name = ", ".join(labels) or "On random instances"
            with reading(result):
                children.append(Section(name, _content(result, name)))
        if len(children) == 1 and len(collection.subjects) == 1:
            # Whose it is needs no saying.
            sections.append(Section(title, children[0].content))
        else:
            sections.append(Section(title, [], children))
    return sections


def missing_figures(results: list[Result]) -> list[str]:
    """Pictures that results name and that are not beside them, or are no PNG."""
    named = [(result, name) for result in results for name in _figures(result)]
    return [
        str(result.path.parent / name)
        for result, name in named
        if embed_png(result.path.parent / name, "", "") is None
    ]


def _figures(result: Result) -> list[str]:
    """Names of files beside the result; a path that leads elsewhere is none."""
    return [Path(str(name)).name for name in result.values.get("figures") or []]


def _content(result: Result, name: str) -> list[Content]:
    pictures = [
        embed_png(
            result.path.parent / figure,
            alt=f"{_ALTS[result.kind]}; {name}. The tables beside it hold its numbers.",
            caption=f"{_ALTS[result.kind]}.",
        )
        for figure in _figures(result)
    ]
    tables = {"heads": head_tables, "slots": slot_tables, "theorem": theorem_tables}[result.kind]
    conditions = conditions_of("These pictures and numbers", result.values)
    return [*(p for p in pictures if p is not None), *tables(result.values), conditions]

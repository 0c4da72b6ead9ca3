"""The sections on the models themselves: what to see first, layer stacks, parameters."""

from collections import Counter
from typing import Any

from midus.report.collect import Subject
from midus.report.document import Part, Row, Section, Stack, Table, Tiles
from midus.report.models import Model
from midus.report.numbers import count, decimal, is_number, plain, share
from midus.report.training import losses_of
from midus.upscaling.plan import PlannedBlock


def overview_section(subjects: list[Subject]) -> Section:
    """The numbers people ask for first: tiles for one subject, a table for several."""
    columns = [_highlights(subject) for subject in subjects]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return Section("Overview")
    if len(subjects) == 1:
        return Section("Overview", [Tiles([(columns[0][name], name) for name in names])])
    rows: list[Row] = [[name, *(column.get(name, "") for column in columns)] for name in names]
    head: Row = ["", *(subject.label for subject in subjects)]
    num_runs = sum(subject.run is not None for subject in subjects)
    notes = ["Each run's held-out text is its own."] if num_runs > 1 else []
    return Section("Overview", [Table("At a glance", head, [Part(rows)], notes)])


def _highlights(subject: Subject) -> dict[str, str]:
    numbers: dict[str, str] = {}
    if subject.model:
        facts = subject.model.facts
        params = facts["params"]
        inserted = facts["num_inserted"]
        blocks = f"{facts['num_base_layers']} + {inserted}" if inserted else ""
        numbers["blocks"] = blocks or str(facts["num_hidden_layers"])
        numbers["parameters"] = _short_count(params["total"])
        if inserted:
            numbers["of them inserted"] = share(1 - params["base"] / params["total"])
    if subject.run:
        before, after = losses_of(subject.run, "perplexity")
        if before is not None and after is not None:
            numbers["held-out perplexity"] = f"{decimal(before)} → {decimal(after)}"
        if is_number(tokens := subject.run.last("tokens")) and tokens:
            numbers["tokens read"] = _short_count(tokens)
    return numbers


def _short_count(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return count(number)


def stack_section(subjects: list[Subject]) -> Section:
    """A picture of every stack, and a table of parameters with a column a model."""
    models = [(subject.label, subject.model) for subject in subjects if subject.model]
    if not models:
        return Section("Layer stack")
    # Models with one stack share its picture.
    stacks: dict[tuple[PlannedBlock, ...], list[str]] = {}
    for label, model in models:
        stacks.setdefault(tuple(model.blocks), []).append(label)
    pictures = [
        (labels, Stack(list(blocks), _summary(blocks))) for blocks, labels in stacks.items()
    ]
    table = _table(models)
    if len(pictures) == 1:
        return Section("Layer stack", [pictures[0][1], table])
    children = [Section(", ".join(labels), [picture]) for labels, picture in pictures]
    return Section("Layer stacks", [table], children)


def _summary(blocks: tuple[PlannedBlock, ...]) -> str:
    kinds = Counter(block.kind for block in blocks)
    counts = " and ".join(f"{number} {kind}" for kind, number in kinds.items())
    positions = [i for i, block in enumerate(blocks) if block.kind != "base"]
    where = f"; inserted at {', '.join(map(str, positions))}" if positions else ""
    return f"{len(blocks)} blocks, from the first to the last: {counts}{where}"


def _table(models: list[tuple[str, Model]]) -> Table:
    columns = [_facts(model) for _, model in models]
    names = dict.fromkeys(name for column in columns for name in column)
    rows: list[Row] = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return Table("Model and parameters", ["", *(label for label, _ in models)], [Part(rows)])


def _facts(model: Model) -> dict[str, str]:
    facts: dict[str, Any] = model.facts
    params = facts["params"]
    shown = {"family": facts["family"]}
    if facts["method"]:
        shown |= {
            "method": facts["method"],
            "base": plain(model.base),
            "blocks, base + inserted": f"{facts['num_base_layers']} + {facts['num_inserted']}",
        }
    else:
        shown["blocks"] = count(facts["num_hidden_layers"])
    if model.memory:
        memory = model.memory
        shown["memory layer"] = str(memory["kind"])
        shown["sub-keys a side (n), slots read (k)"] = f"{memory['num_subkeys']}, {memory['top_k']}"
        shown["slots of all heads and blocks"] = count(facts["slots"])
    shown["base parameters"] = count(params["base"])
    if facts["method"]:
        shown["trainable parameters"] = count(params["trainable"])
        shown["trainable, per cent of all"] = decimal(100 * params["trainable"] / params["total"])
    shown["all parameters"] = count(params["total"])
    return shown

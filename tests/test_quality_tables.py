"""Tables on quality say what the committed results say: no figure without a row behind it."""

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *sorted(RESULTS.glob("quality*.md"))]
WORDS = ("texts", "WikiText-2", "word_perplexity")
# What a column of a table is in a row of results.
PERPLEXITIES = {
    "validation ppl": ("validation", "perplexity"),
    "test ppl": ("test", "perplexity"),
    "WikiText-2": WORDS,
    "WikiText-2, ppl a word": WORDS,
}
BESIDES = {"trained, M": ("trained",), "tokens/s": ("tokens_per_second",), "GB": ("peak_gb",)}
COLUMNS = {**PERPLEXITIES, **BESIDES}
# Whose figures the README has: the study and its method.
OF_THE_README = {
    "Llama Pro, AdamW": ("2026-11-17-long-rates.jsonl", "llama_pro"),
    "MIDUS-HML, `recipe: short` (Muon)": ("2026-11-17-long-rates.jsonl", "recipe"),
    "Llama Pro, Muon": ("2026-11-18-equal-parameters.jsonl", "llama_pro"),
    "Llama Pro, 7 blocks, Muon": ("2026-11-18-equal-parameters.jsonl", "llama_pro_7"),
    "LoRA, Muon": ("2026-11-18-equal-parameters.jsonl", "lora"),
    "the base": ("2026-11-18-equal-parameters.jsonl", "untouched"),
}
# Rows with figures that each page has at least; with fewer a table is no longer read.
LEAST = {
    "README.md": 6,
    "quality.md": 106,
    "quality_bases.md": 30,
    "quality_limits.md": 37,
    "quality_recipe.md": 143,
}


def read_results(folder):
    """Settings of all studies: their rows by seed, each once more for blocks turned down."""
    settings = defaultdict(dict)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "perplexity" not in (row.get("validation") or {}):
                continue
            row["trained"] = row.get("trainable", 0) / 1e6
            row["file"] = path.name
            of = [row.get(name) for name in ("method", "name", "setting", "tokens", "patch")]
            setting = (path.name, json.dumps(of))
            while row.get("seed") in settings[setting]:
                setting = (*setting, "again")
            settings[setting][row.get("seed")] = row
            for gate, read in ((row.get("measures") or {}).get("gates") or {}).items():
                settings[*setting, gate][row.get("seed")] = read
    return [list(seeds.values()) for seeds in settings.values()]


def read_tables(text):
    """Rows of tables that have two perplexities or more, each a dict of its cells with figures."""
    columns = None
    for line in text.splitlines():
        cells = [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            columns = None
        elif columns is None:
            columns = cells
        elif len(PERPLEXITIES.keys() & set(columns)) >= 2:
            row = dict(zip(columns, cells, strict=True))
            found = {name: row[name] for name in COLUMNS.keys() & row.keys()}
            found = {name: cell for name, cell in found.items() if re.match(r"\d", cell)}
            if found.keys() & PERPLEXITIES.keys():
                yield cells[0], found


def value_at(row, path):
    """What a row of results has in such a place, or nothing."""
    for name in path:
        row = (row or {}).get(name)
    return row


def says(cell, values):
    """Whether a cell is the mean of such values, or mean and spread, as far as written out."""
    said, *spread = cell.replace(",", "").split(" ± ")
    found = [(said, statistics.mean(values)), *((s, statistics.stdev(values)) for s in spread)]
    return all(f"{value:.{len(said.partition('.')[2])}f}" == said for said, value in found)


def single_rows(cells):
    """One row for each trial where cells list several: `3.796, 3.787`, or `3.985 -> 3.963`."""
    parts = {name: re.split(r", (?=\d)| -> ", cell) for name, cell in cells.items()}
    for i in range(max(map(len, parts.values()))):
        yield {name: part[i] if len(part) > 1 else part[0] for name, part in parts.items()}


def told(name, rows):
    """What such seeds may say in a column: the most memory, any one's speed, else all of them."""
    values = [value_at(row, COLUMNS[name]) for row in rows]
    if None in values:
        return []
    one_by_one = [[value] for value in values]
    return {"GB": [[max(values)]], "tokens/s": [values, *one_by_one]}.get(name, [values])


def has_a_source(cells, settings):
    """Whether one setting has all of these figures, over its seeds or as one of them."""
    if any(" ± " in cell for cell in cells.values()):
        candidates = [rows for rows in settings if len(rows) > 1]
    else:
        candidates = [[row] for rows in settings for row in rows]
    return any(
        all(any(says(cell, values) for values in told(name, rows)) for name, cell in cells.items())
        for rows in candidates
    )


@pytest.fixture(scope="module")
def settings():
    return read_results(RESULTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_has_a_row_of_results(page, settings):
    rows = [row for _, cells in read_tables(page.read_text()) for row in single_rows(cells)]
    assert len(rows) >= LEAST[page.name]
    assert [cells for cells in rows if not has_a_source(cells, settings)] == []


def test_figures_of_the_readme_are_of_the_methods_it_names(settings):
    tables = dict(read_tables((ROOT / "README.md").read_text()))
    assert tables.keys() == OF_THE_README.keys()
    for label, of in OF_THE_README.items():
        own = [rows for rows in settings if (rows[0].get("file"), rows[0].get("method")) == of]
        assert has_a_source(tables[label], own), label


def test_a_wrong_figure_is_found(settings):
    ((_, headline), *_) = read_tables((RESULTS / "quality.md").read_text())
    assert len(headline) >= 5
    for name, cell in headline.items():
        wrong = cell[:-1] + str((int(cell[-1]) + 1) % 10)
        assert not has_a_source({**headline, name: wrong}, settings), name

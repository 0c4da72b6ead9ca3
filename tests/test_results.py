"""Tables of measured times say what the committed JSON says."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "hml_layer.json").read_text())


def table_rows(path, heading):
    """Cells of the table rows after a heading, by first cell."""
    lines = path.read_text().split(heading, 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| ---")) + 1
    rows = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip(" *x") for cell in line.strip("|").split("|")]
        rows[int(cells[0].replace(",", ""))] = cells[1:]
    return rows


def times(row, kind, clock, names):
    values = [row[f"{name}_{kind}{clock}_ms"] for name in names]
    return [f"{value:.3f}" for value in values] + [f"{values[0] / values[-1]:.1f}"]


@pytest.mark.parametrize(
    ("heading", "kind"), [("Forward, ms:", "fwd"), ("backward, ms:", "fwdbwd")]
)
def test_kernel_tables_are_the_json(heading, kind):
    rows = table_rows(ROOT / "docs" / "kernels.md", heading)
    assert list(rows) == [row["tokens"] for row in RESULT["rows"]]
    for row in RESULT["rows"]:
        expected = times(row, kind, "", ("naive", "compiled", "paper", "ours"))
        expected += times(row, kind, "_graph", ("naive", "ours"))
        if kind == "fwd":
            expected.append(f"{row['floor_fwd_ms']:.4f}")
        assert rows[row["tokens"]] == expected


def test_readme_table_is_the_json():
    rows = table_rows(ROOT / "README.md", "ms in a CUDA graph:")
    for row in RESULT["rows"]:
        if row["tokens"] in rows:
            expected = times(row, "fwd", "_graph", ("naive", "ours"))
            expected += times(row, "fwdbwd", "_graph", ("naive", "ours"))
            assert rows[row["tokens"]] == expected
    assert len(rows) == 3


@pytest.mark.parametrize("name", ["README.md", "docs/kernels.md"])
def test_documents_name_the_commit_of_the_run(name):
    assert RESULT["commit"] in (ROOT / name).read_text()

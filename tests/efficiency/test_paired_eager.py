"""`benchmarks/paired_eager.py` on a tiny shape: a table, and ratios of its rounds."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "paired_eager.py"


def test_ratios_are_taken_within_a_round(tmp_path):
    path = tmp_path / "paired.json"
    command = [sys.executable, str(PATH), "--shape", "tiny", "--device", "cpu", "--rounds", "3"]
    command += ["--tokens", "2", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "MIDUS HML" in done.stdout
    result = json.loads(path.read_text())
    assert result["protocol"] == {"rounds": 3, "tokens": 2, "prompt": 128}
    base, grown = result["rows"]
    assert (base["label"], grown["label"]) == ("Base", "MIDUS HML")
    pairs = zip(grown["runs_tok_s"], base["runs_tok_s"], strict=True)
    ratios = [own / first for own, first in pairs]
    assert len(ratios) == 3
    assert grown["ratio"] == pytest.approx(statistics.median(ratios))
    assert base["ratio"] == 1
    assert grown["fastest_tok_s"] == max(grown["runs_tok_s"])

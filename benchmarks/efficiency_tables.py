"""Writes the measured tables into README.md and docs/results/efficiency.md.

python benchmarks/efficiency_tables.py           # after a run has changed benchmarks/results
python benchmarks/efficiency_tables.py --check   # exits 1 if a document says something else
"""

import sys
from pathlib import Path

from midus.efficiency.tables import blocks_of, replace_blocks
from midus.errors import MidusError

ROOT = Path(__file__).parents[1]


def main() -> None:
    is_check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not is_check:
        sys.exit("usage: efficiency_tables.py [--check]")
    readme, page = blocks_of(ROOT / "benchmarks" / "results")
    stale = []
    for name, blocks in (("README.md", readme), ("docs/results/efficiency.md", page)):
        path = ROOT / name
        if not path.exists():
            continue
        text = path.read_text()
        try:
            wanted = replace_blocks(text, blocks)
        except MidusError as error:
            sys.exit(f"{name}: {error}")
        if wanted != text:
            stale.append(name)
            if not is_check:
                path.write_text(wanted)
    print(f"{'differ' if is_check else 'rewritten'}: {', '.join(stale) or 'none'}")
    sys.exit(1 if is_check and stale else 0)


if __name__ == "__main__":
    main()

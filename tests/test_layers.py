"""Imports follow the arrows of ARCHITECTURE.md and no others."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "midus"

# What each part of the package may import of ours, besides itself.
LEAVES = {"config", "errors", "reports"}
ARROWS = {
    "config": {"errors"},
    "errors": set(),
    "reports": set(),
    "registration": {"models"},
    "ops": LEAVES,
    "memory": {"ops", *LEAVES},
    "models": {"memory", *LEAVES},
    "upscaling": {"models", "memory", *LEAVES},
    "evaluation": {"models", *LEAVES},
    "cli": {"evaluation", "upscaling", "models", "midus", *LEAVES},
    "midus": {"registration", "upscaling", *LEAVES},
}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    name = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    return "midus" if name == "__init__" else name


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "midus":
                known = len(pieces) > 1 and pieces[1] in ARROWS
                parts.add(pieces[1] if known else "midus")
    return parts


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_follow_the_arrows(path):
    part = part_of(path)
    assert imported_parts(path) - {part} <= ARROWS[part]


def test_importing_midus_is_light():
    code = "import sys, midus; print(sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom midus.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.parametrize("order", ["import midus, transformers", "import transformers, midus"])
def test_auto_classes_know_us_whatever_comes_first(order):
    code = (
        f"{order}\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
        "assert type(AutoConfig.for_model('midus_llama')).__name__ == 'MidusLlamaConfig'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

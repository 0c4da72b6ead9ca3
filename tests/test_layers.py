"""Imports follow the arrows of ARCHITECTURE.md and no others."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "midus"

# What each part of the package may import of ours, besides itself.
LEAVES = {"config", "errors", "plot_style", "reports"}
ARROWS = {
    "config": {"errors"},
    "errors": set(),
    "plot_style": set(),
    "reports": set(),
    "registration": {"models"},
    "ops": LEAVES,
    "memory": {"ops", *LEAVES},
    "models": {"memory", "ops", *LEAVES},
    "upscaling": {"models", "memory", *LEAVES},
    "data": {"models", *LEAVES},
    "evaluation": {"data", "models", *LEAVES},
    "analysis": {"data", "models", "memory", *LEAVES},
    "report": {"upscaling", "models", *LEAVES},
    "serving": {"upscaling", "models", *LEAVES},
    "training": {"data", "upscaling", "models", "memory", "ops", *LEAVES},
    "efficiency": {"training", "upscaling", "models", "memory", "ops", *LEAVES},
    "studies": {"data", "evaluation", "training", "upscaling", "models", "memory", *LEAVES},
    "cli": {
        "data",
        "training",
        "evaluation",
        "analysis",
        "report",
        "serving",
        "efficiency",
        "studies",
        "upscaling",
        "models",
        "midus",
        *LEAVES,
    },
    "__main__": {"cli"},
    "midus": {"registration", "upscaling", "models", *LEAVES},
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

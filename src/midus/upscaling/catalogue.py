"""What `midus methods` lists: taken from the registries, so that it cannot go stale."""

import inspect
from pathlib import Path
from typing import Any

from midus.memory import MEMORY_LAYERS
from midus.upscaling.methods import METHODS

_PACKAGE = Path(__file__).parents[1]
_MEMORY_PAPERS = {
    "hml": "Kim et al., 2025",
    "linear": "Kim et al., 2025, preliminaries",
    "pkm": "Lample et al., 2019",
    "ultramem": "Huang et al., 2024",
}


def list_methods() -> list[dict[str, Any]]:
    """One row a method."""
    return [
        {
            "name": method.name,
            "does": method.summary,
            "starts as the base": "yes" if method.preserves_function else "no",
            "trains": method.trains,
            "placement": method.default_placement or "-",
            "paper": method.paper,
            "file": f"midus/upscaling/{method.name}.py",
        }
        for method in METHODS.values()
    ]


def list_memory_layers() -> list[dict[str, Any]]:
    """One row a memory layer; each starts silent, so each starts as the base."""
    rows = []
    for name, layer in MEMORY_LAYERS.items():
        path = Path(inspect.getfile(layer)).relative_to(_PACKAGE.parent)
        summary = (layer.__doc__ or "").strip().splitlines()[0].rstrip(".")
        rows.append(
            {
                "name": name,
                "does": summary,
                "starts as the base": "yes",
                "paper": _MEMORY_PAPERS[name],
                "file": str(path),
            }
        )
    return rows

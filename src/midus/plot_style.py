"""How every picture of ours looks."""

from typing import Any

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
"""For ``matplotlib.rc_context``."""

DARK, LIGHT, WARM, GREY = "#31688e", "#9cc3d9", "#c8553d", "#9a9a9a"

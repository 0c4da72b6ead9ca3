"""Puts the sections into one HTML file that needs nothing else: no network, no scripts.

The page forbids both to itself by its Content-Security-Policy, which allows the one style sheet by
its hash and images inside the page.
"""

import base64
import hashlib
import os
import re
from collections.abc import Callable
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from midus.errors import MidusError
from midus.report.analyses import analysis_sections
from midus.report.charts import draw, style_of
from midus.report.collect import Collection
from midus.report.conditions import conditions_of
from midus.report.document import Section
from midus.report.evaluation import evaluation_section
from midus.report.stacks import overview_section, stack_section
from midus.report.training import training_section
from midus.reports import conditions

GENERATOR = "midus report"
_MARK = f'<meta name="generator" content="{GENERATOR}'
_MARK_WITHIN = 1024


def render(collection: Collection, title: str | None = None) -> str:
    """The page.

    Args:
        collection: What it shows.
        title: Its heading; default: the names of the subjects.
    """
    sections = [
        overview_section(collection.subjects),
        stack_section(collection.subjects),
        training_section(collection.subjects),
        evaluation_section(collection.subjects),
        *analysis_sections(collection),
    ]
    css = _read("style.css")
    here = conditions()
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title or _title(collection),
        generator=f"{GENERATOR} {here['versions']['midus'] or ''}".strip(),
        css=css,
        css_hash=base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        sections=_with_ids(_shown(sections)),
        conditions=conditions_of("This page", {**here, "hardware": None, "machine": None}),
        draw=draw,
        style_of=style_of,
        new_id=_counter(),
    )


def _read(name: str) -> str:
    return files("midus.report").joinpath(name).read_text(encoding="utf-8")


def _title(collection: Collection) -> str:
    names = [subject.label for subject in collection.subjects]
    return f"MIDUS report: {', '.join(names)}" if names else "MIDUS report"


def _shown(sections: list[Section]) -> list[Section]:
    """Without headings that nothing stands under."""
    return [
        Section(section.title, section.content, _shown(section.children))
        for section in sections
        if not section.is_empty
    ]


def _with_ids(sections: list[Section], prefix: str = "") -> list[dict[str, Any]]:
    """Sections with anchors made of their titles."""
    rows: list[dict[str, Any]] = []
    for number, section in enumerate(sections, start=1):
        slug = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")[:40]
        anchor = f"{prefix}{number}-{slug}" if prefix else f"s{number}-{slug}"
        rows.append(
            {
                "id": anchor,
                "title": section.title,
                "content": section.content,
                "children": _with_ids(section.children, f"{anchor}-"),
            }
        )
    return rows


def _counter() -> Callable[[str], str]:
    numbers = count(1)
    return lambda prefix: f"{prefix}-{next(numbers)}"


def check_output(path: Path, overwrite: bool) -> None:
    """Refuses a file that is no report, unless it may be replaced."""
    if path.is_dir():
        raise MidusError(f"{path} is a folder; give a file, such as {path / 'report.html'}")
    if not path.exists() or overwrite:
        return
    with path.open("rb") as file:
        is_ours = _MARK.encode() in file.read(_MARK_WITHIN)
    if not is_ours:
        raise MidusError(
            f"{path} exists and is no report of midus; choose another file or pass --overwrite"
        )


def write_page(path: Path, html: str, overwrite: bool = False) -> None:
    """Writes the page aside and renames it.

    Args:
        path: File to write.
        html: The page.
        overwrite: Whether a file that is no report may be replaced; a report always is.
    """
    check_output(path, overwrite)
    path = Path(os.path.realpath(path))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of files need not be valid Unicode.
        aside.write_bytes(html.encode("utf-8", "replace"))
        aside.replace(path)
    except OSError as error:
        raise MidusError(f"{path} cannot be written ({error}); choose another file") from error
    finally:
        aside.unlink(missing_ok=True)

"""What a page is made of: sections that hold tables, charts, pictures and conditions.

Plain data without markup. The template alone writes HTML and escapes every text.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

Point = tuple[float, float]


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    note: str = ""
    """Smaller, after the text: a standard error, a unit."""
    is_best: bool = False
    marked: str = ""
    """Between text and rest, highlighted: the token of a context."""
    rest: str = ""
    tokens: tuple[tuple[str, str], ...] = ()
    """Each in a frame of its own, with a smaller note after it or none."""


Row = list[Cell | str]


@dataclass(frozen=True)
class Part:
    """Rows that belong together; a title sets them apart from the rows above."""

    rows: list[Row]
    title: str = ""


@dataclass(frozen=True)
class Table:
    """The first column names the rows."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: Row
    parts: list[Part]
    notes: list[str] = field(default_factory=list)
    is_folded: bool = False
    """Closed at first: numbers behind a picture."""
    is_text: bool = False
    """Cells hold sentences, which wrap, and not numbers, which do not."""

    @property
    def has_names(self) -> bool:
        """Whether rows are named by words and not by numbers."""
        firsts = (row[0] for part in self.parts for row in part.rows)
        return any(len(cell if isinstance(cell, str) else cell.text) > 8 for cell in firsts)


@dataclass(frozen=True)
class Series:
    """One line of a chart; equal colours are one run, equal dashes one quantity."""

    label: str
    points: list[Point]
    colour: int = 0
    dash: int = 0
    has_dots: bool = False
    is_faint: bool = False
    band: list[tuple[float, float, float]] = field(default_factory=list)
    """(x, low, high): the range behind a mean."""


@dataclass(frozen=True)
class Chart:
    """Lines over one horizontal axis."""

    kind: ClassVar[str] = "chart"
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    from_zero: bool = False
    may_be_log: bool = False
    """Whether its vertical axis is logarithmic where values differ by much."""
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """An image in the page itself."""

    kind: ClassVar[str] = "picture"
    uri: str
    alt: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class Stack:
    """The blocks of a model, first block first."""

    kind: ClassVar[str] = "stack"
    blocks: list[Any]
    """Each with ``kind`` (base, memory or copy) and ``source``, its base index."""
    summary: str


@dataclass(frozen=True)
class Tiles:
    """A few numbers to see first, each with its name."""

    kind: ClassVar[str] = "tiles"
    numbers: list[tuple[str, str]]


@dataclass(frozen=True)
class Conditions:
    """Where a result comes from."""

    kind: ClassVar[str] = "conditions"
    of: str
    entries: list[tuple[str, str]]


@dataclass(frozen=True)
class Text:
    """One sentence or a few."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Source:
    """A file as it is, closed at first."""

    kind: ClassVar[str] = "source"
    title: str
    text: str


Content = Table | Chart | Picture | Stack | Tiles | Conditions | Text | Source


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    content: list[Content] = field(default_factory=list)
    children: list["Section"] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.content and all(child.is_empty for child in self.children)

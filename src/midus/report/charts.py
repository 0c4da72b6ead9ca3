"""Where lines, ticks and labels of a chart stand; the template draws them as SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midus.report.document import Chart, Point, Series

# A phone shows a chart at this width in pixels, a screen somewhat larger.
WIDTH, HEIGHT = 400, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 20, 28, 42
_MOST_POINTS = 400
# Where the largest value is so many times the smallest, a linear axis shows only the former.
_LOG_FROM = 30
_COLOURS, _DASHES = 6, 4


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """One series in drawing coordinates."""

    label: str
    path: str
    band: str
    dots: list[Point]
    classes: str


@dataclass(frozen=True)
class Drawing:
    """A chart in drawing coordinates."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    y_label: str
    lines: list[Line]
    description: str


@dataclass(frozen=True)
class Axis:
    """Values of one axis and where they stand."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[Tick]:
        marks = log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)
        return [Tick(self.place(value), label) for value, label in marks]


def draw(chart: Chart) -> Drawing:
    """Scales a chart to its box."""
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points]
    ys += [edge for series in chart.series for _, low, high in series.band for edge in (low, high)]
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
    across = Axis(*_padded(min(xs), max(xs), 0.0), left, right)
    up = _vertical(chart, min(ys), max(ys), bottom, top)
    return Drawing(
        width=WIDTH,
        height=HEIGHT,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_ticks=across.ticks(),
        y_ticks=up.ticks(),
        y_label=f"{chart.y_label}, logarithmic" if up.is_log else chart.y_label,
        lines=[
            _line(series, lambda x, y: (across.place(x), up.place(y))) for series in chart.series
        ],
        description=describe(chart),
    )


def _vertical(chart: Chart, low: float, high: float, bottom: float, top: float) -> Axis:
    if chart.may_be_log and low > 0 and high > _LOG_FROM * low:
        return Axis(low / 1.2, high * 1.2, bottom, top, is_log=True)
    from_zero = (chart.from_zero or chart.may_be_log) and low >= 0 and high > 0
    low, high = _padded(low, high, 0.05)
    return Axis(0.0 if from_zero else low, high, bottom, top)


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most so many points: the ends, and the lowest and highest of every stretch between."""
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    stretches = (most - 2) // 2
    kept = [points[0]]
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        kept += sorted({min(stretch, key=_height), max(stretch, key=_height)})
    return [*kept, points[-1]]


def _height(point: Point) -> float:
    return point[1]


def ticks(low: float, high: float, about: int = 5) -> list[tuple[float, str]]:
    """Round values between two numbers, a few of them, with their labels."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    size = max(abs(low), abs(high))
    return [(i * step, _tick_label(i * step, step, size)) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten between two numbers; with 2 and 5 times them where they are few."""
    powers = [10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    factors = (1,) if high / low > 1e3 else (1, 2, 5)
    values = [power * factor for power in powers for factor in factors]
    return [(v, _tick_label(v, v, v)) for v in values if low <= v <= high]


def describe(chart: Chart) -> str:
    """The chart in a sentence a line, for those who do not see it."""
    sentences = [f"{chart.y_label} over {chart.x_label}."]
    for series in chart.series:
        (x0, y0), (x1, y1) = series.points[0], series.points[-1]
        lowest = min(y for _, y in series.points)
        highest = max(y for _, y in series.points)
        sentences.append(
            f"{series.label}: {y0:.4g} at {x0:,.0f}, {y1:.4g} at {x1:,.0f}; "
            f"between {lowest:.4g} and {highest:.4g}."
        )
    return " ".join(sentences)


def style_of(series: Series) -> str:
    """CSS classes of a line and of its key in the legend."""
    faint = " faint" if series.is_faint else ""
    return f"c{series.colour % _COLOURS} d{series.dash % _DASHES}{faint}"


def _line(series: Series, place: Callable[[float, float], Point]) -> Line:
    points = [place(x, y) for x, y in thin(series.points)]
    edge = [place(x, high) for x, _, high in series.band]
    edge += [place(x, low) for x, low, _ in reversed(series.band)]
    return Line(
        label=series.label,
        path=_path(points),
        band=_path(edge) + "Z" if edge else "",
        # A lone point has no line.
        dots=points if series.has_dots or len(points) == 1 else [],
        classes=style_of(series),
    )


def _path(points: list[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _padded(low: float, high: float, by: float) -> tuple[float, float]:
    """A range with some air; one value alone gets a range around it."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        air = abs(high) / 2 or 1.0
        return low - air, high + air
    return low - by * (high - low), high + by * (high - low)


def _tick_label(value: float, step: float, size: float) -> str:
    """All labels of an axis have one unit, by its largest value."""
    if value == 0:
        return "0"
    if size >= 1e4:
        unit, letter = (1e6, "M") if size >= 1e6 else (1e3, "k")
        return f"{value / unit:.6g}{letter}"
    if step < 1e-4:
        return f"{value:.3g}".replace("e-0", "e-")
    # As many digits as the step has: 0.25 has two.
    digits = next(digits for digits in range(8) if math.isclose(step, round(step, digits)))
    return f"{value:.{digits}f}"

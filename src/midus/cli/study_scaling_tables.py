"""What `midus study scaling` prints, and the same as JSON."""

from dataclasses import asdict
from typing import Any

from rich.measure import Measurement
from rich.table import Table

from midus.cli import console
from midus.reports import conditions
from midus.studies.power_law import interval
from midus.studies.scaling import (
    FEWEST_POINTS,
    Crossing,
    Fit,
    Prediction,
    Scaling,
    decades_outside,
    predict,
    ratio,
)

Known = tuple[str, float, float]
CURVES_NOTE = (
    "points inside one schedule: before its end the rate is still high, so a shorter run would "
    "end lower, and neighbours share their noise; neither laws nor intervals are those of runs"
)
ASSUMPTION = (
    "an assumption that nothing here was measured for: another model loses the same share of its "
    "loss when its slots grow"
)


def print_scaling(found: Scaling, at: list[float], known: list[Known], assume: bool) -> None:
    """Laws, predictions, crossings, and what was left out."""
    _print_table(
        f"validation loss over {found.over}: E + A x^-alpha, with 95 % intervals",
        ["series", "points", "seeds", "trained, M", "losses", "alpha", "E", "A", "R²"],
        [_cells(fit) for fit in found.fits],
    )
    for fit in found.fits:
        if fit.why_not:
            console.out.print(f"{fit.series.label}: {fit.why_not}", style="yellow")
        elif fit.law and fit.law.at_edge():
            console.out.print(
                f"{fit.series.label}: alpha is the smallest or largest that is tried; these points "
                "do not determine it",
                style="yellow",
            )
    fits = [fit for fit in found.fits if fit.law]
    if at and fits:
        rows = [_predicted(fit.series.label, predict(fit, x)) for fit in fits for x in at]
        _print_table("\npredicted", ["series", found.over, "loss", "extrapolated"], rows)
    for crossing in found.crossings:
        console.out.print(_crossing(crossing))
    if found.crossings:
        console.out.print("crossings are where two laws meet, not where runs were seen to")
    if assume:
        _print_assumed(_longest(fits), at, known)
    _print_left_out(found)


def to_json(found: Scaling, at: list[float], known: list[Known], assume: bool) -> dict[str, Any]:
    """Everything that is printed, with every point."""
    values: dict[str, Any] = {
        "kind": "midus.scaling",
        "over": found.over,
        "points": "curves" if found.curves else "ends of runs",
        "series": [_series(fit, at) for fit in found.fits],
        "too_few_points": [series.label for series in found.short],
        "crossings": [
            {
                "series": [crossing.one.series.label, crossing.other.series.label],
                "at": crossing.places,
                "followed_to": crossing.until,
                "share_of_draws_that_cross": crossing.share,
            }
            for crossing in found.crossings
        ],
        "failed_trials": found.num_failed,
        "conditions": conditions(),
    }
    if assume:
        fits = _longest([fit for fit in found.fits if fit.law])
        steps = [_step(fit, start, end) for fit in fits for start, end in _steps(fit, at)]
        values["assumed"] = {
            "assumption": ASSUMPTION,
            "shares": steps,
            "losses": [row for fit in fits for one in known for row in _elsewhere(fit, one, at)],
        }
    return values


def _series(fit: Fit, at: list[float]) -> dict[str, Any]:
    law = None
    if fit.law and fit.draws:
        law = {
            name: {"value": float(value), "interval": interval(drawn)}
            for name, value, drawn in (
                ("alpha", fit.law.alpha, fit.draws.alpha),
                ("E", fit.law.floor, fit.draws.floor),
                ("A", fit.law.scale, fit.draws.scale),
            )
        }
    return {
        "method": fit.series.method,
        "setting": fit.series.setting,
        "points": [asdict(point) for point in fit.points],
        "seed_spread": fit.series.spread,
        "span": fit.span,
        "law": law,
        "why_no_law": fit.why_not or None,
        "at_edge": fit.law.at_edge() if fit.law else None,
        "r2": fit.r2,
        "predictions": [asdict(predict(fit, x)) for x in at] if fit.law else [],
    }


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Whole numbers, however narrow the terminal is."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    wide = console.out.options.update(width=1000)
    table.width = Measurement.get(console.out, wide, table).maximum
    console.out.print(table)


def _cells(fit: Fit) -> list[str]:
    trained, means = [point.trainable / 1e6 for point in fit.points], fit.series.means()
    cells = [
        fit.series.label,
        str(len(fit.series.places)),
        str(len(fit.series.seeds)),
        " - ".join(dict.fromkeys([f"{min(trained):.4g}", f"{max(trained):.4g}"])),
        f"{means[0]:.4f} - {means[-1]:.4f}",
    ]
    if not fit.law or not fit.draws:
        return [*cells, "-", "-", "-", "-"]
    return [
        *cells,
        _with_interval(float(fit.law.alpha), interval(fit.draws.alpha), 3),
        _with_interval(float(fit.law.floor), interval(fit.draws.floor), 3),
        f"{float(fit.law.scale):.4g}",
        f"{fit.r2:.4f}",
    ]


def _with_interval(value: float, bounds: tuple[float, float], digits: int) -> str:
    low, high = bounds
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _predicted(label: str, one: Prediction) -> list[str]:
    loss = _with_interval(one.loss, (one.low, one.high), 4)
    return [label, f"{one.x:,.0f}", loss, _outside(one.decades)]


def _outside(decades: float) -> str:
    return f"by {decades:.2f} decades" if decades else "no"


def _crossing(crossing: Crossing) -> str:
    one, other = crossing.one.series, crossing.other.series
    share = f"{100 * crossing.share:.0f} % of the draws cross"
    if not crossing.places:
        return f"{one.label} and {other.label} do not cross up to {crossing.until:.2g}; {share}"
    where = []
    for x in crossing.places:
        # Both must have been seen there.
        decades = max(decades_outside(series, x) for series in (one, other))
        inside = f"{decades:.2f} decades outside the data" if decades else "inside the data"
        where.append(f"{x:.3g}, {inside}")
    return f"{one.label} and {other.label} would cross at {' and '.join(where)}; {share}"


def _longest(fits: list[Fit]) -> list[Fit]:
    """Of each method, those of its longest runs: the nearest to what another model would get."""
    tokens = [fit.series.facts.get("data.max_tokens") or 0 for fit in fits]
    most: dict[str, int] = {}
    for fit, own in zip(fits, tokens, strict=True):
        most[fit.series.method] = max(own, most.get(fit.series.method, 0))
    pairs = zip(fits, tokens, strict=True)
    return [fit for fit, own in pairs if own == most[fit.series.method]]


def _print_assumed(fits: list[Fit], at: list[float], known: list[Known]) -> None:
    if not fits:
        console.out.print("no law, so there is no share of loss to carry to other models")
        return
    console.out.print(f"\n{ASSUMPTION}", style="yellow")
    rows = []
    for fit in fits:
        for start, end in _steps(fit, at):
            step = _step(fit, start, end)
            share = _with_interval(100 * step["share"], (100 * step["low"], 100 * step["high"]), 2)
            extrapolated = _outside(step["decades"])
            rows.append([fit.series.label, f"{start:,.0f}", f"{end:,.0f}", share, extrapolated])
    _print_table(
        "share of the loss that more slots take away",
        ["series", "slots", "to", "share, %", "extrapolated"],
        rows,
    )
    found = [row for fit in fits for one in known for row in _elsewhere(fit, one, at)]
    if found:
        cells = [
            [
                row["model"],
                row["series"],
                f"{row['known_at']:,.0f}",
                f"{row['known_loss']:.4f}",
                f"{row['slots']:,.0f}",
                _with_interval(row["loss"], (row["low"], row["high"]), 4),
                _outside(row["decades"]),
            ]
            for row in found
        ]
        columns = ["model", "law of", "slots", "loss", "to", "assumed loss", "extrapolated"]
        _print_table("\nother models, if so", columns, cells)


def _steps(fit: Fit, at: list[float]) -> list[tuple[float, float]]:
    """From the fewest slots to every other number, those that were asked for included."""
    first, *others = fit.series.places
    return [(first, end) for end in sorted({*others, *at} - {first})]


def _step(fit: Fit, start: float, end: float) -> dict[str, Any]:
    value, low, high = ratio(fit, start, end)
    outside = decades_outside(fit.series, end)
    names = {"series": fit.series.label, "from": start, "to": end, "decades": outside}
    return {**names, "share": 1 - value, "low": 1 - high, "high": 1 - low}


def _elsewhere(fit: Fit, known: Known, at: list[float]) -> list[dict[str, Any]]:
    """A known loss of another model carried to every other number of slots."""
    name, loss, start = known
    rows = []
    for end in sorted({*fit.series.places, *at} - {start}):
        value, low, high = ratio(fit, start, end)
        outside = max(decades_outside(fit.series, x) for x in (start, end))
        rows.append(
            {
                "model": name,
                "series": fit.series.label,
                "known_at": start,
                "known_loss": loss,
                "slots": end,
                "loss": loss * value,
                "low": loss * low,
                "high": loss * high,
                "decades": outside,
            }
        )
    return rows


def _print_left_out(found: Scaling) -> None:
    if found.curves:
        console.out.print(CURVES_NOTE, style="yellow")
    if found.short:
        names = ", ".join(dict.fromkeys(series.method for series in found.short))
        console.out.print(
            f"left out   {len(found.short):,} series with fewer than {FEWEST_POINTS} numbers of "
            f"{found.over} ({names})"
        )
    if found.num_failed:
        console.out.print(f"failed     {found.num_failed:,} trials, which no law has seen")

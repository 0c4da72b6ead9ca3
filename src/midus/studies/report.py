"""A study's results as a Markdown page: chosen on validation, reported on test."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from midus.studies.choosing import Choice, choose, chosen_rows, final_rows, goes_on, search_rows
from midus.studies.fairness import count_trials, differences
from midus.studies.figures import (
    Line,
    Pick,
    about_tasks,
    missing_tasks,
    of_text,
    on_test,
    on_validation,
    peak_gb,
    shown_tasks,
    spread,
    task_columns,
    to_table,
    tokens_read,
)
from midus.studies.folder import read_study_folder
from midus.studies.grid import lengths, search_trials
from midus.studies.options import StudyOptions
from midus.studies.paper_rows import Searched
from midus.studies.paper_section import beside_the_paper
from midus.studies.results import Row, is_done, read_results
from midus.studies.speeds import about_speeds, speed_cell
from midus.studies.standings import (
    BEHIND,
    OPEN,
    Standings,
    about_going,
    labels,
    said_of_standings,
    standings,
)
from midus.studies.trials import base_key

REPORT_NAME = "report.md"


@dataclass(frozen=True)
class StudyReport:
    """What can be told of a study so far."""

    study: StudyOptions
    lines: list[Line]
    """By test perplexity, best first; the untouched base last."""
    missing: dict[str, str]
    """Methods that are not in the table, and why."""
    searched: Searched
    """Every trial of the search, method by method, with its row where it has ended."""
    in_search: Standings
    """Where some methods go on: every one with its rows of the search, best first, and whether."""

    @property
    def trials(self) -> list[Row]:
        """The rows of the search, by validation loss."""
        rows = [row for _, row in self.searched if row is not None]
        return sorted(rows, key=lambda row: (not is_done(row), on_validation(row) or 0.0))


def make_report(out: Path) -> StudyReport:
    """Reads a study's folder; methods whose search has not ended are named as missing."""
    study, identity = read_study_folder(out)
    rows = read_results(out)
    lines: list[Line] = []
    missing: dict[str, str] = {}
    searched: Searched = []
    in_search: list[tuple[Choice, Line, bool | None]] = []
    going = goes_on(study, identity, rows)
    for name, method in study.methods.items():
        found = search_rows(study, identity, rows, name)
        searched += found
        left = sum(row is None for _, row in found)
        choice = choose(study, identity, rows, name)
        if choice is None:
            missing[name] = f"{left} trials are left" if left else "every trial failed"
            continue
        own = [row for _, row in chosen_rows(study, identity, rows, choice) if row is not None]
        in_search.append((choice, Line(method.label or name, choice, own, len(own)), going[name]))
        if going[name] is None:
            missing[name] = "whether it goes on is known when every search has ended"
        if not going[name]:
            continue
        finals = [row for _, row in final_rows(study, identity, rows, choice)]
        ended = [row for row in finals if row is not None]
        done = [row for row in ended if is_done(row)]
        if len(ended) < len(finals):
            left = len(finals) - len(ended)
            missing[name] = f"{left} of {len(finals)} final seeds are left"
        elif not done:
            missing[name] = "every final seed failed"
        else:
            lines.append(Line(method.label or name, choice, done, len(finals)))
    lines.sort(key=lambda line: statistics.mean(line.values(on_test)))
    base = rows.get(base_key(search_trials(study)[0].options, identity))
    lines += [Line("the base, untouched", None, [base])] if base and is_done(base) else []
    return StudyReport(study, lines, missing, searched, standings(study, in_search))


def to_markdown(report: StudyReport, figures: list[str]) -> str:
    """The page: the table, what it leaves out, pictures, the paper's order, and the search."""
    study = report.study
    at = f", {both[0]:,} tokens" if (both := lengths(study)) else ""
    parts = [f"# {study.name}", _preface(report)]
    tasks = task_columns(shown_tasks(report.study, report.lines))
    cells = [_cells(line, study, tasks) for line in report.lines]
    parts.append(to_table(_columns(study, tasks), cells))
    edges = [
        f"- {line.label}: the best {', '.join(line.choice.at_edge)} is the smallest or largest "
        "that was tried; a wider search may find a better one."
        for line in [*report.lines, *_without_finals(report)]
        if line.choice and line.choice.at_edge
    ]
    missing = [f"- {name}: {why}." for name, why in report.missing.items()]
    missing += missing_tasks(
        ((line.label, line.rows) for line in report.lines), shown_tasks(study, report.lines)
    )
    missing += said_of_standings(study, report.in_search)
    if edges or missing:
        parts.append("\n".join(edges + missing))
    parts += about_speeds([*report.trials, *(row for line in report.lines for row in line.rows)])
    parts += [f"![{name}]({name})" for name in figures]
    behind = labels(report.in_search, BEHIND)
    if beside := beside_the_paper(study, report.lines, report.searched, behind):
        parts.append(beside)
    if report.in_search:
        parts += _search_section(report, at)
    parts.append(f"## Every trial of the search{at}")
    columns = ["method", "setting", "seed", "validation", "tokens/s", "GB", "ended"]
    parts.append(to_table(columns, [_trial_cells(row) for row in report.trials]))
    return "\n\n".join(parts) + "\n"


def _preface(report: StudyReport) -> str:
    study = report.study
    rows = [row for line in report.lines for row in line.rows]
    machines = ", ".join(sorted({row["hardware"] for row in rows})) or "no machine yet"
    commits = ", ".join(sorted({str(row["conditions"]["commit"]) for row in rows}))
    chosen = "Settings are chosen by validation loss and reported on test"
    if both := lengths(study):
        chosen = (
            f"Settings were chosen by validation loss in trials of {both[0]:,} tokens; figures are "
            f"of other trials, of {both[1]:,} tokens, on test"
        )
    return (
        f"{chosen}, the mean over the seeds that the table counts ± their standard deviation. "
        f"{about_going(study)}{_equality(study)}{about_tasks(study)} On {machines}; commit "
        f"{commits}."
    )


def _search_section(report: StudyReport, at: str) -> list[str]:
    """Methods side by side as the search has them: the only place for those that stayed behind."""
    study, columns = report.study, _columns(report.study, {})
    cells = [[line.label, word, *_cells(line, study, {})[1:]] for line, word in report.in_search]
    about = (
        "Each at its best setting, with the seeds of the search, by validation loss, which chose "
        "both the setting and who goes on to the final seeds: of several the best is a little "
        "lucky. Figures of the final seeds are of other trials; compare within a table."
    )
    table = to_table([columns[0], "goes on", *columns[1:]], cells)
    return [f"## Every method in the search{at}", about, table]


def _without_finals(report: StudyReport) -> list[Line]:
    return [line for line, word in report.in_search if word in (BEHIND, OPEN)]


def _equality(study: StudyOptions) -> str:
    """What is the same for all trials, which a study may give up."""
    trials = search_trials(study)
    found, counts = differences(trials), count_trials(trials)
    same = "Data, their order, tokens, batch, precision and evaluation are the same for every trial"
    if lengths(study):
        same += " of the search, and for every final one"
    if found:
        same = f"Trials differ in {', '.join(found)}, so this compares nothing"
    if len(set(counts.values())) == 1:
        return f"{same}; every method tries as many."
    return f"{same}; methods differ in how many they try, which favours those with more."


def _columns(study: StudyOptions, tasks: dict[str, Pick]) -> list[str]:
    return [
        "method",
        "trained, M",
        "best setting",
        "trials",
        "seeds",
        *(["tokens"] if lengths(study) else []),
        "validation ppl",
        "test ppl",
        *(f"{name}, ppl a word" for name in study.texts),
        *tasks,
        "tokens/s",
        "GB",
    ]


def _cells(line: Line, study: StudyOptions, tasks: dict[str, Pick]) -> list[str]:
    choice, rows = line.choice, line.rows
    trials = "-"
    if choice:
        failed = f" ({choice.num_failed} failed)" if choice.num_failed else ""
        trials = f"{choice.num_trials}{failed}"
    return [
        line.label,
        f"{rows[0]['trainable'] / 1e6:.4g}",
        (choice.setting if choice else "") or "-",
        trials,
        _seeds(line),
        *([_tokens(line)] if lengths(study) else []),
        spread(line.values(on_validation), 3),
        spread(line.values(on_test), 3),
        *(spread(line.values(of_text(name)), 2) for name in study.texts),
        *(spread(line.of_every_seed(pick), 2) for pick in tasks.values()),
        speed_cell(rows),
        spread([max(line.values(peak_gb))] if line.values(peak_gb) else [], 1),
    ]


def _seeds(line: Line) -> str:
    done = len(line.rows)
    if done == line.num_seeds:
        return str(done) if line.choice else "-"
    return f"{done} of {line.num_seeds}, {line.num_seeds - done} failed"


def _tokens(line: Line) -> str:
    found = sorted({tokens_read(row) for row in line.rows}) if line.choice else []
    return ", ".join(f"{num:,}" for num in found) or "-"


def _trial_cells(row: Row) -> list[str]:
    perplexity = on_validation(row)
    return [
        row["method"],
        row["setting"] or "-",
        str(row["seed"]),
        spread([] if perplexity is None else [perplexity], 3),
        speed_cell([row]),
        spread([row["peak_gb"]] if row.get("peak_gb") else [], 1),
        row["status"].replace("_", " "),
    ]

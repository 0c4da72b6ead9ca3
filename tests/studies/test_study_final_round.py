"""The final round: as long as it is told, of the methods that go on, and of its own rows alone."""

from pathlib import Path

import pytest
import yaml
from small import HML, Ticks, fake_row, make_study, report_of, rows_of

from midus.errors import MidusError
from midus.studies.choosing import choose, goes_on
from midus.studies.figures import about_lengths
from midus.studies.finalists import find_finalists
from midus.studies.folder import read_study_folder
from midus.studies.grid import count_finals, final_trials, lengths, search_trials
from midus.studies.options import StudyOptions
from midus.studies.plots import _length
from midus.studies.report import make_report, to_markdown
from midus.studies.results import add_result
from midus.studies.run import run_study
from midus.studies.scaling_series import read_series
from midus.studies.standings import BEHIND, labels
from midus.studies.timing import Deadline

PLACES = {"base": "somewhere", "tokens": "elsewhere"}
PRO = {"label": "Llama Pro", "set": {"upscale.method": "llama_pro"}}
THREE = {"full": {}, "hml": {"set": HML, "label": "MIDUS-HML"}, "pro": PRO}
ONE_RATE = {"search": {"optimizer.lr": [1e-3]}}
LONG = {"final_seeds": [0, 100], "final_tokens": 1024}
SHORT_AND_LONG = {"methods": THREE, **ONE_RATE, **LONG}


# What a grid comes to.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"final_tokens": 512}, "final_tokens=512 is of the final round; give final_seeds"),
        ({"finalists": 1}, "finalists=1 is of the final round; give final_seeds"),
        ({**LONG, "final_tokens": 63}, "final_tokens=63 is less than one step of 4 sequences"),
        *[
            ({"final_seeds": [0], name: value}, f"{name}=.* must be a positive whole number or")
            for name in ("final_tokens", "finalists")
            for value in (0, -1, 1.5, True, "many")
        ],
        ({"final_seeds": [0], "finalists": 3}, "finalists=3 is more than the 2 methods there are"),
        *[
            (
                {"final_seeds": [0], "equal_trials": False, **option}
                | {"methods": {"full": {"vary": {"data.max_tokens": [256]}}}},
                f"{next(iter(option))} needs a search whose trials are of one length",
            )
            for option in ({"final_tokens": 1024}, {"finalists": 1})
        ],
    ],
)
def test_a_final_round_that_cannot_be_is_refused_in_a_sentence(overrides, message):
    with pytest.raises(MidusError, match=message):
        search_trials(make_study(PLACES, **overrides))


def test_final_trials_are_as_long_as_told_and_none_of_the_searchs():
    study = make_study(PLACES, **LONG)
    searched, finals = search_trials(study), final_trials(study, "hml", {"optimizer.lr": 0.01})
    assert {trial.tokens for trial in searched} == {512}
    assert [(trial.seed, trial.tokens) for trial in finals] == [(0, 1024), (100, 1024)]
    assert finals[0].options.trainer["max_steps"] == 16
    assert not {t.key("same") for t in finals} & {t.key("same") for t in searched}
    assert lengths(study) == (512, 1024)


@pytest.mark.parametrize("tokens", [None, 512])
def test_as_many_tokens_as_in_the_search_are_the_same_trials(tokens):
    study = make_study(PLACES, final_seeds=[0], final_tokens=tokens)
    (final,) = final_trials(study, "hml", {"optimizer.lr": 0.01})
    assert final.key("same") in {trial.key("same") for trial in search_trials(study)}
    assert lengths(study) is None


@pytest.mark.parametrize(
    ("finalists", "kept", "said"),
    [
        (None, [], "trials     3, then 6 with the final seeds"),
        (None, ["hml"], "trials     3, then 6 with the final seeds"),
        (2, [], "trials     3, then 4 with the final seeds"),
        (1, ["hml"], "trials     3, then 2 to 4 with the final seeds"),
        (1, ["hml", "pro"], "trials     3, then 4 to 6 with the final seeds"),
        (2, ["hml", "pro"], "trials     3, then 4 to 6 with the final seeds"),
        (1, ["full", "hml", "pro"], "trials     3, then 6 with the final seeds"),
    ],
)
def test_a_dry_run_counts_the_final_trials(midus, tmp_path, finalists, kept, said):
    methods = {name: {**own, "keep": name in kept} for name, own in THREE.items()}
    grid = {"methods": methods, "finalists": finalists, "final_seeds": [100, 200], **ONE_RATE}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(make_study(PLACES, **grid).to_dict()))
    args = ("study", "run", path, "--out", tmp_path / "out", "--dry-run")
    assert said in midus(*args).out
    longer = said.replace(",", " of 512 tokens,").replace(" with", " of 1,024 tokens with")
    assert longer in midus(*args, "--set", "final_tokens=1024").out


@pytest.mark.parametrize(
    ("finalists", "kept", "counts"),
    [(None, [], (3, 3)), (1, [], (1, 1)), (1, ["hml"], (1, 2)), (2, ["hml", "pro"], (2, 3))],
)
def test_trials_of_the_search_that_are_final_do_not_count_again(finalists, kept, counts):
    methods = {name: {**own, "keep": name in kept} for name, own in THREE.items()}
    grid = {"methods": methods, "finalists": finalists, "final_seeds": [0, 100], **ONE_RATE}
    assert count_finals(make_study(PLACES, **grid)) == counts


# Who goes on.


def rows_with(study, figures):
    found = [
        fake_row(study, trial, figure)
        for trial, figure in zip(search_trials(study), figures, strict=True)
        if figure != "left"
    ]
    return {row["key"]: row for row in found}, found[0]["identity"]


@pytest.mark.parametrize(
    ("finalists", "kept", "losses", "going"),
    [
        (None, [], [3, 1, 2], [True, True, True]),
        (1, [], [3, 1, 2], [False, True, False]),
        (2, [], [3, 1, 2], [False, True, True]),
        (1, ["full"], [3, 1, 2], [True, True, False]),
        (1, ["hml"], [3, 1, 2], [False, True, False]),  # kept and best is one, not two
        (2, [], [3, None, 2], [True, False, True]),  # a failed search has ended
        (1, ["full"], [3, "left", 2], [True, None, None]),
        (1, [], [2, 2, 3], [True, False, False]),
    ],
)
def test_the_best_of_the_search_go_on_and_the_kept_besides(finalists, kept, losses, going):
    methods = {name: {**own, "keep": name in kept} for name, own in THREE.items()}
    study = make_study(PLACES, methods=methods, finalists=finalists, final_seeds=[0], **ONE_RATE)
    # On test they stand the other way round.
    figures = [(one, 10 - one) if isinstance(one, int) else one for one in losses]
    rows, identity = rows_with(study, figures)
    assert list(goes_on(study, identity, rows).values()) == going


def test_final_rows_decide_neither_settings_nor_who_goes_on():
    study = make_study(PLACES, **LONG, finalists=1)
    rows, identity = rows_with(study, [(3, 3), (2, 2), (5, 5), (4, 4)])
    for lr in (1e-3, 1e-2):
        for trial in final_trials(study, "hml", {"optimizer.lr": lr}):
            row = fake_row(study, trial, (lr, lr))
            rows[row["key"]] = row
    assert choose(study, identity, rows, "hml").validation_loss == 4
    assert goes_on(study, identity, rows) == {"full": True, "hml": False}


# The report.


def test_the_report_says_both_lengths_and_shows_final_rows_alone(tmp_path):
    finals = [("full", 1e-2, [(0.5, 0.5), (0.6, 0.7)]), ("hml", 1e-3, [(0.4, 0.3), (0.4, 0.5)])]
    figures = [(3, 3), (2, 2), (4, 4), (5, 5)]
    report = report_of(tmp_path, PLACES, figures, finals, **LONG)
    text = to_markdown(report, [])
    assert "chosen by validation loss in trials of 512 tokens; figures are of other" in text
    assert "trials, of 1,024 tokens, on test, the mean over" in text
    assert "the same for every trial of the search, and for every final one; every" in text
    assert "| best setting | trials | seeds | tokens | validation ppl | test ppl |" in text
    assert "| hml | 2 | lr=0.001 | 2 | 2 | 1,024 | 4.000 ± 0.000 | 4.000 ± 1.414 |" in text
    assert "| full | 2 | lr=0.01 | 2 | 2 | 1,024 | 5.500 ± 0.707 | 6.000 ± 1.414 |" in text
    assert "## Every trial of the search, 512 tokens" in text
    assert _length(report.lines) == ": trials of 1,024 tokens"
    assert "Every method in the search" not in text


def test_a_search_row_of_a_final_seed_is_no_final_row(tmp_path):
    finals = [("full", 1e-3, ["left", (0.6, 0.7)])]
    report = report_of(tmp_path, PLACES, [(3, 3)] * 3, finals, **SHORT_AND_LONG)
    assert report.lines == []
    assert report.missing["full"] == "1 of 2 final seeds are left"
    assert report.missing["hml"] == "2 of 2 final seeds are left"


def test_who_stayed_behind_is_named_and_has_a_table_of_the_search(tmp_path):
    methods = {**THREE, "pro": {**PRO, "keep": True}}
    finals = [("full", 1e-3, [(0.5, 0.5)] * 2), ("pro", 1e-3, [(0.4, 0.4)] * 2)]
    study = {**SHORT_AND_LONG, "methods": methods, "finalists": 1, "paper": "math"}
    report = report_of(tmp_path, PLACES, [(1, 1), (2, 2), (3, 3)], finals, **study)
    assert [line.label for line in report.lines] == ["Llama Pro", "full"]
    assert report.missing == {}
    text = to_markdown(report, [])
    assert "went on: the 1 best of the search by validation loss, and those whose models" in text
    assert "- Not among the 1 best of the search, so without final seeds: MIDUS-HML. What" in text
    final, _, search = text.partition("## Every method in the search, 512 tokens")
    assert "| MIDUS-HML |" not in final
    assert "and here since their models are kept: Llama Pro." in final
    rows = [line for line in search.split("## Every trial")[0].splitlines() if "lr=" in line]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| full", "yes"],
        ["| MIDUS-HML", "no"],
        ["| Llama Pro", "kept"],
    ]
    assert "| 1 | 1 | 512 | 20.000 | 20.000 |" in rows[1]
    assert "here: test ppl, 1,024 tokens" in final
    assert "- Left out, since they have no final seeds: MIDUS-HML." in final


def test_final_rows_of_who_goes_on_no_more_are_not_shown(tmp_path):
    finals = [("full", 1e-3, [(0.5, 0.5)] * 2), ("pro", 1e-3, [(0.4, 0.4)] * 2)]
    study = {**SHORT_AND_LONG, "finalists": 1}
    report = report_of(tmp_path, PLACES, [(1, 1), (2, 2), (3, 3)], finals, **study)
    assert [line.label for line in report.lines] == ["full"]
    assert labels(report.in_search, BEHIND) == ["MIDUS-HML", "Llama Pro"]


def test_while_searches_are_left_nobody_is_called_behind(tmp_path):
    study = make_study(PLACES, **SHORT_AND_LONG, finalists=1)
    report_of(tmp_path, PLACES, [(1, 1)] * 3, **SHORT_AND_LONG, finalists=1)
    (tmp_path / "results.jsonl").unlink()
    add_result(tmp_path, fake_row(study, search_trials(study)[0], (1, 1)))
    report = make_report(tmp_path)
    assert report.missing["full"] == "whether it goes on is known when every search has ended"
    assert report.missing["pro"] == "1 trials are left"
    assert labels(report.in_search, BEHIND) == []
    assert "| full | not known yet |" in to_markdown(report, [])


def test_settings_stand_beside_the_papers_tables_at_the_length_of_the_search(tmp_path):
    vary = {"upscale.memory.top_k": [1, 2]}
    methods = {"hml": {"set": {"upscale.method": "midus"}, "vary": vary}}
    study = {"methods": methods, "search": {}, "paper": "general", **LONG}
    text = to_markdown(report_of(tmp_path, PLACES, [(1, 1), (2, 2), (3, 3)], **study), [])
    assert "here: validation ppl, 512 tokens" in text
    assert "1,024 tokens" not in text.partition("## Beside the paper")[2]


# Whole studies.


@pytest.fixture(scope="module")
def ended(material, tmp_path_factory):
    """Three methods, the best and the kept with final seeds that are twice as long."""
    out, said = tmp_path_factory.mktemp("ended"), []
    methods = {**THREE, "hml": {**THREE["hml"], "keep": True}}
    own = {**SHORT_AND_LONG, "methods": methods, "finalists": 1, "curve_points": 2}
    study = make_study(material, **own)
    run_study(study, out, say=said.append)
    return study, out, said


def test_a_study_chooses_in_short_trials_and_ends_with_long_ones(ended):
    study, out, said = ended
    rows = [row for row in rows_of(out)[1:] if "model" not in row]
    search, finals = rows[:3], rows[3:]
    best = min(search, key=lambda row: row["validation"]["loss"])["method"]
    going = [name for name in study.methods if name in (best, "hml")]
    assert [row["tokens"] for row in search] == [512] * 3
    found = [(row["method"], row["seed"], row["tokens"], row["steps"]) for row in finals]
    assert found == [(name, seed, 1024, 16) for name in going for seed in (0, 100)]
    assert [point["tokens"] for point in finals[0]["curve"]] == [512, 1024]
    low, high = count_finals(study)
    assert low <= len(finals) <= high
    assert any(f"{going[0]}, lr=0.001, seed 0, 1,024 tokens" in line for line in said)
    assert sum("not among the 1 best, so there is no final round" in line for line in said) == (
        3 - len(going)
    )
    assert run_study(study, out).ran == 0


def test_the_models_to_fine_tune_are_the_long_ones(ended):
    _, out, _ = ended
    kept = find_finalists(out, *read_study_folder(out))[1:]
    assert [(one.method, one.seed, one.row["tokens"]) for one in kept] == [
        ("hml", 0, 1024),
        ("hml", 100, 1024),
    ]


def test_short_and_long_trials_are_places_of_a_series_over_tokens_and_two_over_slots(ended):
    _, out, _ = ended
    (tokens,) = [one for one in read_series(out, "tokens")[0] if one.method == "hml"]
    assert (tokens.places, tokens.seeds) == ([512, 1024], [0])
    slots = [one for one in read_series(out, "slots")[0] if one.method == "hml"]
    assert [one.facts["data.max_tokens"] for one in slots] == [512, 1024]


@pytest.mark.parametrize(
    ("changed", "tokens", "num_methods"),
    [
        ({"final_tokens": 256}, 256, 1),
        ({"final_tokens": None}, 512, 1),
        ({"finalists": None}, 1024, 3),
    ],
    ids=["tokens", "as the search", "finalists"],
)
def test_the_search_counts_on_where_the_final_round_changes(
    ended, tmp_path, changed, tokens, num_methods
):
    study, out, _ = ended
    for name in ("results.jsonl", "study.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    other = StudyOptions.from_dict({**study.to_dict(), "methods": THREE, **changed})
    before = len(rows_of(tmp_path))
    run_study(other, tmp_path)
    added = rows_of(tmp_path)[before:]
    assert added
    assert {row["tokens"] for row in added} == {tokens}
    shown = [line for line in make_report(tmp_path).lines if line.choice]
    assert len(shown) == num_methods
    assert {row["tokens"] for line in shown for row in line.rows} == {tokens}


def test_with_some_methods_only_the_kept_do_not_wait_for_the_others(material, tmp_path):
    methods = {**THREE, "full": {"keep": True}}
    own = {**SHORT_AND_LONG, "methods": methods, "finalists": 1, "final_seeds": [100]}
    study, said = make_study(material, **own), []
    assert run_study(study, tmp_path, only=["full", "hml"], say=said.append).ran == 3
    assert rows_of(tmp_path)[-1]["method"] == "full"
    assert "hml: searches are left that decide if it is among the 1 best" in said


def test_a_final_trial_that_is_stopped_goes_on_as_itself(material, tmp_path):
    study = make_study(material, methods={"full": {}}, **ONE_RATE, **LONG)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_study(study, whole)
    for _ in range(60):
        if not run_study(study, parts, deadline=Deadline(6, Ticks())).is_out_of_time:
            break
    assert rows_of(parts) == rows_of(whole)
    assert [row["tokens"] for row in rows_of(parts)[1:]] == [512, 1024, 1024]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("math", "56 of 1,638,400 tokens, then 15 to 27 of 6,553,600 tokens with the final seeds"),
        ("general", "14, then 0 with the final seeds"),
    ],
)
def test_the_grids_of_methods_say_their_lengths(midus, tmp_path, grid, said):
    path = Path(__file__).parents[2] / "studies" / f"{grid}_methods.yaml"
    told = midus("study", "run", path, "--out", tmp_path, "--dry-run").out
    assert f"trials     {said}" in told


def test_the_fine_tuned_models_lengths_are_said(material):
    said = "settings were chosen in trials of 512 tokens, and final models read 1,024."
    assert about_lengths(make_study(material, **LONG)).endswith(said)
    assert about_lengths(make_study(material, final_seeds=[0])) == ""

"""The paper's order beside ours: its figures, what counts as the same run, and what is decided."""

import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from small import make_study, report_of

from midus.errors import MidusError
from midus.evaluation.paper import PAPER
from midus.evaluation.suites import find_suite
from midus.studies.grid import search_trials
from midus.studies.options import read_study
from midus.studies.paper_ablations import ABLATIONS
from midus.studies.paper_order import Entry, Order, is_settled
from midus.studies.paper_rows import _values, paper_name
from midus.studies.report import make_report, to_markdown

GRIDS = Path(__file__).parents[2] / "studies"
PLACES = {"base": "somewhere", "tokens": "elsewhere"}
LLAMA_PRO = {"label": "Llama Pro", "set": {"upscale.method": "llama_pro"}}
HML = {"label": "MIDUS-HML", "set": {"upscale.method": "midus"}}
METHODS = {"pro": LLAMA_PRO, "hml": HML, "base": {"label": "Base"}}
WIKI = {"texts": {"WikiText-2": "wiki.txt"}}


def section(report):
    _, heading, after = to_markdown(report, []).partition("## Beside the paper")
    return (heading + after).partition("## Every trial")[0]


def of_one_method(name, backbone="Llama-3.2-1B"):
    (row,) = [
        row
        for row in PAPER["general"]
        if (row.method, row.backbone, row.stage) == (name, backbone, "CPT")
    ]
    return row


# The paper's own figures.


@pytest.mark.parametrize("table", ABLATIONS, ids=lambda table: table.title)
def test_averages_of_the_papers_ablations_are_means_of_its_seven_tasks(table):
    over = find_suite("general").average.over
    for row in table.rows.values():
        mean = statistics.mean(row.scores[key] for key in over)
        assert abs(mean - row.average) < 0.0061, row  # both are rounded


@pytest.mark.parametrize("table", ABLATIONS, ids=lambda table: table.title)
def test_every_ablation_has_the_papers_main_row_once(table):
    main = of_one_method("MIDUS-HML")
    same = [row for row in table.rows.values() if row.scores == main.scores]
    assert [row.average for row in same] == [main.average]


def test_memory_layers_are_the_same_in_both_places():
    for (kind, _), row in ABLATIONS[0].rows.items():
        name = {"linear": "Linear", "pkm": "PKM", "ultramem": "UltraMem", "hml": "MIDUS-HML"}[kind]
        twin = of_one_method(name)
        assert (row.scores, row.average) == (twin.scores, twin.average)


# Orders.


def entries(*figures):
    return [Entry(str(i), paper, list(ours)) for i, (paper, *ours) in enumerate(figures)]


@pytest.mark.parametrize(
    ("figures", "tau"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1),
        ([(1, 30), (2, 20), (3, 10)], -1),
        ([(1, 10), (2, 30), (3, 20), (4, 40)], (5 - 1) / 6),
        # Two of three pairs have an order in the paper, all three here.
        ([(1, 10), (1, 20), (2, 30)], 2 / (2 * 3) ** 0.5),
        ([(1, 10), (1, 20)], None),
        ([(1, 9, 11), (2, 15, 25)], 1),  # means over seeds
    ],
)
def test_tau_is_kendalls_with_ties(figures, tau):
    found = Order(entries(*figures), paper_is_loss=True, ours_is_loss=True).tau()
    assert found == (None if tau is None else pytest.approx(tau))
    mixed = Order(entries(*figures), paper_is_loss=False, ours_is_loss=True).tau()
    assert mixed == (None if tau is None else pytest.approx(-tau))


def test_ranks_begin_at_the_best_and_equal_ones_share_theirs():
    order = Order(entries((5, 1), (7, 3), (7, 2), (9, 2)), paper_is_loss=False, ours_is_loss=True)
    assert order.paper_ranks() == ["4", "2=", "2=", "1"]
    assert order.our_ranks() == ["1", "4", "2=", "2="]


def test_means_are_apart_where_welchs_test_says_so():
    # Variance 0.5 each: a standard error of sqrt(0.25 + 0.25), and two degrees of freedom.
    apart = 4.303 * 0.5**0.5
    assert is_settled([1, 2], [1 + apart + 0.01, 2 + apart + 0.01])
    assert not is_settled([1, 2], [1 + apart - 0.01, 2 + apart - 0.01])
    # Variances 1 and 0 of three each: two again, and a standard error of sqrt(1 / 3).
    apart = 4.303 / 3**0.5
    assert is_settled([-1, 0, 1], [apart + 0.01] * 3)
    assert not is_settled([-1, 0, 1], [apart - 0.01] * 3)
    # One variance alone: one degree of freedom.
    apart = 12.706 * 0.5
    assert is_settled([-0.5, 0.5], [apart + 0.01] * 2)
    assert not is_settled([-0.5, 0.5], [apart - 0.01] * 2)
    many = [-1.0, 1.0] * 200
    assert is_settled(many, [value + 0.16 for value in many])
    assert not is_settled(many, [value + 0.13 for value in many])
    assert is_settled([1, 1], [2, 2])
    assert not is_settled([1, 1], [1, 1])


@pytest.mark.parametrize("num_seeds", [2, 3, 5])
def test_equals_are_seldom_called_apart(num_seeds):
    draw = random.Random(0).gauss
    found = [
        is_settled([draw(0, 1) for _ in range(num_seeds)], [draw(0, 1) for _ in range(num_seeds)])
        for _ in range(4_000)
    ]
    assert 0.01 < statistics.mean(found) < 0.06


def test_pairs_are_called_what_they_are():
    figures = [(1, 10, 10.2), (2, 30, 30.2), (3, 20, 20.2), (3, 40, 40.2), (4, 40, 40.3), (5, 50)]
    order = Order(entries(*figures), paper_is_loss=True, ours_is_loss=True)
    found = {(p.ahead.label, p.behind.label): (p.verdict, p.is_reversed) for p in order.pairs()}
    assert len(found) == 15
    assert found["0", "1"] == ("agree", False)
    assert found["2", "1"] == ("disagree", True)
    assert found["2", "3"] == ("tied", False)
    assert found["3", "4"] == ("undecided", False)
    assert {found[other, "5"] for other in "01234"} == {("undecided", False)}
    assert {(p.ahead.label, p.behind.label) for p in order.pairs() if p.has_one_seed} == {
        (other, "5") for other in "01234"
    }


# Which runs are the paper's.


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ({}, "Base"),
        ({"upscale.method": "base"}, "Base"),
        ({"upscale.method": "solar"}, "SOLAR"),
        ({"upscale.method": "opt_deus"}, "OpT-DeUS"),
        ({"upscale.method": "opt_deus", "upscale.ot_rescale": True}, None),
        ({"upscale.method": "stack"}, None),
        ({"upscale.method": "midus"}, "MIDUS-HML"),
        ({"upscale.method": "midus", "upscale.placement": "distributed"}, "MIDUS-HML"),
        ({"upscale.method": "midus", "upscale.placement": "top_heavy"}, None),
        ({"upscale.memory": {"value_proj_init": "identity"}}, "MIDUS-HML"),
        ({"upscale.memory": {"kind": "ultramem"}}, "UltraMem"),
        ({"upscale.memory": {"kind": "pkm", "query_proj": False}}, None),
        *[
            ({"upscale.memory": {option: value}}, None)
            for option, value in {
                "bypass": "attention",
                "memory_output_proj": True,
                "values": "shared",
                "query_norm": "layer",
                "num_subkeys": 32,
                "top_k": 8,
                "latent_dim": 32,
            }.items()
        ],
        ({"upscale.num_inserted": 3}, None),
        ({"upscale.method": "midus", "key_start": "queries"}, None),
        ({"upscale.method": "midus", "control": "lora"}, None),
        ({"upscale.method": "midus", "trainable": "all"}, None),
        ({"upscale.method": "llama_pro", "optimizer.matrices": "muon"}, None),
        ({"upscale.method": "llama_pro", "trainer.optim": "sgd"}, None),
    ],
)
def test_a_run_has_the_papers_name_if_it_is_the_papers(own, name):
    study = make_study(PLACES, methods={"one": {"set": own}}, seeds=[7])
    assert {paper_name(trial.options) for trial in search_trials(study)} == {name}


@pytest.mark.parametrize("grid", ["math_methods", "general_methods"])
def test_the_grids_of_methods_have_all_of_the_papers(grid):
    study = read_study(GRIDS / f"{grid}.yaml")
    named = {paper_name(trial.options) for trial in search_trials(study)}
    of_the_paper = {row.method for row in PAPER["general"]}
    assert of_the_paper <= named
    assert study.paper == grid.partition("_")[0]


def test_the_grid_on_general_text_differs_in_data_rates_and_what_is_measured():
    math, general = (read_study(GRIDS / f"{name}_methods.yaml") for name in ("math", "general"))
    left, right = math.to_dict(), general.to_dict()
    changed = {key for key in left if left[key] != right[key]}
    assert changed == {"name", "run", "methods", "search", "final_seeds", "tasks", "paper"} | {
        "finalists",
        "final_tokens",
    }
    left["run"]["data"] |= {"sources": "study_data/general", "max_tokens": 3_276_800}
    assert left["run"] == right["run"]
    # Each at one of the rates that math tried, and the same besides.
    tried = [(t.method, _but_length(t.options)) for t in search_trials(math)]
    for trial in search_trials(general):
        assert (trial.method, _but_length(trial.options)) in tried


def _but_length(options):
    return replace(options, data=None, trainer={})


def test_the_grids_have_every_setting_of_the_papers_ablations_but_low_rates():
    study = read_study(GRIDS / "ablations.yaml")
    trials = search_trials(study)
    assert paper_name(trials[0].options) == "MIDUS-HML"
    (layers,) = [table for table in ABLATIONS if "upscale.memory.kind" in table.options]
    for table in [table for table in ABLATIONS if table is not layers]:
        alone = [t for t in trials if set(t.varied) <= set(table.options)]
        have = {_values(trial, table) for trial in alone}
        wanted = {(1e-4,)} if table.title == "Learning rate" else set(table.rows)
        assert wanted <= have, table.title
    # Each varies something that a table is about.
    known = set(itertools.chain(*(table.options for table in ABLATIONS)))
    assert set(study.methods["hml"].vary) <= known
    others = search_trials(read_study(GRIDS / "general_methods.yaml"))
    kinds = {t.options.upscale.memory.kind for t in others if t.method not in ("full", "lora")}
    assert {kind for kind, *_ in layers.rows} <= kinds


# The section.


def test_methods_stand_beside_the_papers_with_ranks_and_what_disagrees(tmp_path):
    finals = [
        ("pro", 1e-3, [(1, 2.0), (1, 2.1)]),  # test perplexities of 20 and 21
        ("hml", 1e-3, [(1, 4.0), (1, 4.1)]),
        ("base", 1e-3, [(1, 3.98), (1, 4.18)]),
    ]
    study = {"methods": METHODS, "final_seeds": [5, 6], "search": {"optimizer.lr": [1e-3]}}
    figures = [(1.0, 1.0)] * 3
    text = section(report_of(tmp_path, PLACES, figures, finals, paper="math", **study))
    first, second = text.split("### ")[1:]
    # Without accuracy, test perplexity stands beside the paper's average.
    assert first.startswith(
        "average accuracy, %: Llama-3.2-1B after CPT on MathPile (tab:math)\n\n"
        "| method | paper | rank | here: test ppl | rank |\n"
    )
    assert "| Llama Pro | 11.57 | 2 | 20.500 ± 0.707 | 1 |" in first
    assert "| MIDUS-HML | 12.55 | 1 | 40.500 ± 0.707 | 2 |" in first
    assert "| Base | 11.20 | 3 | 40.800 ± 1.414 | 3 |" in first
    assert "was not measured here; perplexity of this study's text stands in." in first
    # HML-Pro is the other way round, HML-Base and Pro-Base are not.
    assert "Kendall's tau 0.33 over 3 methods; 3 pairs: 1 agree, 1 disagree, 1 undecided." in first
    assert (
        "- Llama Pro is ahead of MIDUS-HML here (20.500 against 40.500), behind it in the paper "
        "(11.57 against 12.55)."
    ) in first
    assert "| MIDUS-HML | 39.40 | 1 | 40.500 ± 0.707 | 2 |" in second
    assert second.startswith("average accuracy, %: Llama-3.1-8B")


def test_nothing_is_decided_with_one_seed(tmp_path):
    study = {"methods": METHODS, "search": {}, "paper": "math"}
    text = section(report_of(tmp_path, PLACES, [(1, 2.0), (1, 4.0), (1, 5.0)], **study))
    assert text.count("3 pairs: 0 agree, 0 disagree, 3 undecided.") == 2
    line = "- Undecided (one seed), the other way round in the paper: Llama Pro ahead of MIDUS-HML."
    assert text.count(line) == 2


def test_wikitext_and_the_mean_of_the_suite_are_taken_where_they_were_measured(tmp_path):
    methods = {**METHODS, "lora": {"set": {"upscale.method": "midus", "control": "lora"}}}
    scores = {"tasks_mean": 0.5, "tasks_of": "these", "texts": {"WikiText-2": {}}}
    scores["tasks"] = {"wikitext": {"word_perplexity": 30.25, "stderr": None, "n": 1}}
    study = {"methods": methods, "search": {}, "final_seeds": [0], "paper": "general", **WIKI}
    study["tasks"] = {"suite": "general"}
    report = report_of(tmp_path, PLACES, [(1.0, 2.0)] * 4, extra=scores, **study)
    text = section(report)
    headings = [part.partition(":")[0] for part in text.split("### ")[1:]]
    assert headings == ["WikiText ppl", "average accuracy, %"] * 2
    assert "| MIDUS-HML | 11.64 | 1 | 30.25 | 1= |" in text
    assert "| MIDUS-HML | 53.50 | 1 | 50.00 | 1= |" in text
    assert text.count("All 3 methods are equal in one of the two, so there is no Kendall's") == 4
    # In the paper's order, whichever the figure is.
    for part in text.split("### ")[1:]:
        labels = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| ")]
        assert labels[2:] == [f"| {name}" for name in ("MIDUS-HML", "Llama Pro", "Base")]
    assert text.rstrip().endswith("- Left out, since the paper has no such run: lora.")
    assert "not measured" not in text


def test_a_text_stands_in_for_the_harnesss_wikitext(tmp_path):
    study = {"methods": METHODS, "search": {}, "paper": "general", **WIKI}
    extra = {"texts": {"WikiText-2": {"word_perplexity": 41.5}}}
    text = section(report_of(tmp_path, PLACES, [(1.0, 2.0)] * 3, extra=extra, **study))
    assert "| method | paper | rank | here: WikiText-2, ppl a word | rank |" in text
    assert "| Llama Pro | 12.33 | 2 | 41.50 | 1= |" in text


def test_settings_stand_beside_the_papers_tables(tmp_path):
    vary = {"upscale.memory.top_k": [1, 8, 3], "optimizer.weight_decay": [1e-2]}
    methods = {"hml": {**HML, "vary": vary}}
    # Two rates each: k = 4, 1, 8, 3, then the decay; the second rate of k = 4 is its better one.
    figures = [(3.0, 9.0), (2.0, 9.0), (2.5, 9.0), (4.0, 9.0), (1.0, 9.0), None, None, (7.0, 9.0)]
    figures += [None, None]
    report = report_of(tmp_path, PLACES, figures, methods=methods, paper="general")
    text = section(report)
    (part,) = text.split("### ")[1:]
    assert part.startswith("Top-k, average accuracy, %: Llama-3.2-1B (tab:topk)")
    rows = [line for line in part.splitlines() if line.startswith("| ")][1:]
    assert [row for row in rows if "---" not in row] == [
        "| MIDUS-HML, top_k=4 | 53.50 | 1 | 20.000 | 2 |",
        "| top_k=8 | 53.37 | 2 | 10.000 | 1 |",
        "| top_k=1 | 53.03 | 3 | 25.000 | 3 |",
        "| top_k=3 | - | - | 70.000 | - |",
    ]
    assert "Kendall's tau 0.33 over 3 settings; 3 pairs: 0 agree, 0 disagree, 3 undec" in part
    assert "Weight decay: trials of weight_decay=0.01 are left or failed." in text


def test_a_setting_with_trials_left_is_named_and_not_shown(tmp_path):
    methods = {"hml": {**HML, "vary": {"upscale.memory.top_k": [1, 8]}}}
    study = {"methods": methods, "paper": "general"}
    report_of(tmp_path, PLACES, [(1.0, 1.0)] * 6, **study)
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(lines[:-1]))  # the second rate of k = 8
    text = section(make_report(tmp_path))
    assert "| top_k=1 | 53.03 |" in text
    assert "| top_k=8 |" not in text
    assert "Top-k: trials of top_k=8 are left or failed." in text


def test_a_method_with_a_seed_that_has_no_figure_is_not_ranked(tmp_path):
    study = {"methods": METHODS, "search": {}, "seeds": [0, 100], "paper": "general", **WIKI}
    extra = {"texts": {"WikiText-2": {"word_perplexity": 41.5}}}
    report_of(tmp_path, PLACES, [(1.0, 2.0)] * 6, extra=extra, **study)
    text = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(text.replace("41.5", "null", 1))  # Llama Pro's first
    wiki, accuracy, *_ = section(make_report(tmp_path)).split("### ")[1:]
    assert "| Llama Pro" not in wiki
    assert "Without this figure for every seed: Llama Pro." in wiki
    assert "| MIDUS-HML | 11.64 | 1 | 41.50 ± 0.00 | 1= |" in wiki
    assert "| Llama Pro | 50.67 |" in accuracy


def test_a_method_with_a_seed_that_failed_is_left_out_and_named(tmp_path):
    study = {"methods": METHODS, "final_seeds": [5, 6], "search": {"optimizer.lr": [1e-3]}}
    finals = [(name, 1e-3, [(1, 2.0), (1, 2.1)]) for name in METHODS]
    report_of(tmp_path, PLACES, [(1.0, 1.0)] * 3, finals, paper="math", **study)
    path = tmp_path / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    failed = next(row for row in rows if (row["method"], row["seed"]) == ("hml", 6))
    failed["status"] = "diverged"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = section(make_report(tmp_path))
    assert "| MIDUS-HML" not in text
    assert text.count("1 pairs:") == 2
    assert "- Left out, since a seed failed: MIDUS-HML." in text


def test_settings_of_another_method_are_not_the_papers(tmp_path):
    own = {"upscale.method": "midus", "upscale.memory.bypass": "attention"}
    methods = {"hml": {"set": own, "vary": {"upscale.memory.top_k": [1, 8]}}}
    study = {"methods": methods, "search": {}, "paper": "general"}
    text = section(report_of(tmp_path, PLACES, [(1.0, 1.0)] * 3, **study))
    assert "###" not in text
    assert "No two methods or settings that have results are the paper's too." in text


def test_one_setting_in_both_is_no_order(tmp_path):
    methods = {"hml": {**HML, "vary": {"optimizer.lr": [1e-4, 3e-3]}}}
    study = {"methods": methods, "search": {}, "paper": "general"}
    text = section(report_of(tmp_path, PLACES, [(1.0, 1.0)] * 3, **study))
    assert "| lr=0.0001 | 53.50 | 1 | 10.000 | 1 |" in text
    assert "One setting is in both, so there is no order to compare." in text


def test_a_study_that_names_no_tables_has_no_such_section(midus, tmp_path):
    study = {"methods": METHODS, "search": {}}
    assert section(report_of(tmp_path / "a", PLACES, [(1.0, 1.0)] * 3, **study)) == ""
    report_of(tmp_path / "b", PLACES, [(1.0, 1.0)] * 3, paper="math", **study)
    told = midus("study", "report", tmp_path / "b")
    assert told.code == 0, told.err
    assert "## Beside the paper" in (tmp_path / "b" / "report.md").read_text()
    with pytest.raises(MidusError, match="paper='maths' is unknown; choose from general, math"):
        make_study(PLACES, paper="maths")


# Grids like others.

BASE = "{name: a, run: {model: m, batch_size: 4}, methods: {x: {label: X}, y: {}}, seeds: [1, 2]}"


def test_a_grid_like_another_takes_what_it_does_not_say(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.yaml").write_text(BASE)
    own = (
        "{like: inner/a.yaml, name: b, run: {batch_size: 8}, seeds: [3], methods: {y: null, z: {}}}"
    )
    (tmp_path / "b.yaml").write_text(own)
    (tmp_path / "c.yaml").write_text("{like: b.yaml}")
    study = read_study(tmp_path / "c.yaml", ["methods.x.keep=true", "final_seeds=[5]"])
    assert (study.name, study.run, study.seeds) == ("b", {"model": "m", "batch_size": 8}, [3])
    assert list(study.methods) == ["x", "z"]
    assert (study.methods["x"].label, study.methods["x"].keep) == ("X", True)


def test_overrides_reach_what_another_grid_says(tmp_path):
    run = "run: {model: m, data: {sources: [one, two], seq_len: 8, max_tokens: 64}, batch_size: 2}"
    (tmp_path / "a.yaml").write_text(f"name: a\n{run}\nmethods: {{x: {{}}}}")
    (tmp_path / "b.yaml").write_text("like: a.yaml")
    study = read_study(tmp_path / "b.yaml", ["run.data.sources.1=three"])
    assert study.run["data"]["sources"] == ["one", "three"]


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ("none.yaml", r"a.yaml: like: .*none.yaml cannot be read \(No such file or directory\)"),
        ("a.yaml", r"a.yaml: like='a.yaml' leads back to itself"),
        ("b.yaml", r"a.yaml: like: .*b.yaml: like='\./a.yaml' leads back to itself"),
        ("[a]", r"a.yaml: like=\['a'\] must be a file beside it"),
        ("null", r"a.yaml: like=None must be a file"),
    ],
)
def test_a_grid_like_none_is_refused_in_a_sentence(tmp_path, like, message):
    (tmp_path / "a.yaml").write_text(f"like: {like}")
    (tmp_path / "b.yaml").write_text("like: ./a.yaml")
    with pytest.raises(MidusError, match=message):
        read_study(tmp_path / "a.yaml")

"""The evaluation tables."""

import pytest
from pages import Page, evaluation, write_json

from midus.errors import MidusError
from midus.report import collect, render

OTHER = "f" * 12
PAPER = [
    {"method": "SOLAR", "backbone": "Llama-3.2-1B", "stage": "CPT",
     "scores": {"arc_easy": 63.01, "wikitext": 13.1}, "average": 51.5},
    {"method": "MIDUS-HML", "backbone": "Llama-3.2-1B", "stage": "CPT",
     "scores": {"arc_easy": 65.5, "wikitext": 12.4}, "average": 53.25},
]  # fmt: skip


def page_of(tmp_path, *documents, targets=None):
    paths = [
        str(write_json(tmp_path / f"{i}.json", document)) for i, document in enumerate(documents)
    ]
    return Page(render(collect([*(targets or []), *paths])))


def best_cells(page):
    return [strong.text for table in page.all("table") for strong in table.find("strong")]


ROWS = [("base", OTHER, 0.5, 0.625, 20.0), ("grown", "a" * 12, 0.55, 0.6, 18.5)]


def test_scores_are_per_cent_with_standard_errors_and_perplexities_as_they_are(tmp_path):
    rows = page_of(tmp_path, evaluation(ROWS)).table("Scores")
    assert rows[0] == [
        "model", "ARC acc ↑, 0-shot", "PIQA acc ↑, 0-shot", "Wiki ppl ↓, 0-shot",
        "Average mean of 2 ↑",
    ]  # fmt: skip
    assert rows[1] == ["base", "50.00 ± 1.00", "62.50 ± 1.00", "20.00 ± 0.01", "56.25"]
    assert rows[2] == ["grown", "55.00 ± 1.00", "60.00 ± 1.00", "18.50 ± 0.01", "57.50"]


def test_the_best_is_bold_higher_or_lower_as_the_metric_asks(tmp_path):
    page = page_of(tmp_path, evaluation(ROWS))
    assert best_cells(page) == ["62.50", "55.00", "18.50", "57.50"]


def test_a_single_model_is_not_the_best(tmp_path):
    assert best_cells(page_of(tmp_path, evaluation(ROWS[:1]))) == []


def test_equals_are_both_best(tmp_path):
    rows = [("a", OTHER, 0.5, 0.6, 9.0), ("b", "a" * 12, 0.5, 0.4, 10.0)]
    assert best_cells(page_of(tmp_path, evaluation(rows))).count("50.00") == 2


def test_the_papers_rows_stand_apart_and_never_compete(tmp_path):
    page = page_of(tmp_path, evaluation(ROWS, paper=PAPER))
    (table,) = page.all("table")
    ours, papers = table.find("tbody")
    assert "SOLAR" not in ours.text
    assert "not measured here: Llama-3.2-1B, CPT" in papers.text
    assert [cell.text for cell in ours.find("strong")] == ["62.50", "55.00", "18.50", "57.50"]
    rows = page.table("Scores")
    assert rows[-2] == ["SOLAR", "63.01", "–", "13.10", "51.50"]  # noqa: RUF001  # a missing score
    assert rows[-1] == ["MIDUS-HML", "65.50", "–", "12.40", "53.25"]  # noqa: RUF001
    assert papers.find("strong") == []


def test_missing_tasks_are_named_as_partial(tmp_path):
    document = evaluation([("m", OTHER, 0.5, None, 9.0)], missing=["mmlu"])
    document["columns"] = [c for c in document["columns"] if c["task"] != "piqa"]
    page = page_of(tmp_path, document)
    # The one that failed, and the one that nobody asked for but the average needs.
    assert "Partial: mmlu, piqa not measured for m." in page.root.text
    assert page.table("Scores")[1][-1] == "–"  # noqa: RUF001  # no mean without all its parts


def test_a_task_on_other_documents_says_so(tmp_path):
    document = evaluation(ROWS)
    document["columns"][0]["variant_of"] = "arc"
    assert "ARC: other documents than those of arc." in page_of(tmp_path, document).root.text


def with_variant(over, rows=ROWS, **values):
    """PIQA was measured on other documents; the average names its tasks as given."""
    document = evaluation(rows, paper=PAPER, **values)
    document["columns"][1] |= {"task": "piqa_untitled", "label": "PIQA*", "variant_of": "piqa"}
    for row in document["rows"]:
        row["scores"]["piqa_untitled"] = row["scores"].pop("piqa")
    document["average"]["over"] = over
    return document


@pytest.mark.parametrize("over", [["arc_easy", "piqa"], ["arc_easy", "piqa_untitled"]])
def test_an_average_with_a_variant_says_so_and_has_none_of_the_papers_beside_it(tmp_path, over):
    page = page_of(tmp_path, with_variant(over))
    assert "Average counts piqa_untitled for piqa, for base, grown." in page.root.text
    assert "Partial" not in page.root.text
    rows = page.table("Scores")
    assert rows[0][-1] == "Average mean of 2, with piqa_untitled ↑"
    assert rows[1][-1] == "56.25"
    assert rows[-1] == ["MIDUS-HML", "65.50", "–", "12.40", "–"]  # noqa: RUF001


def test_averages_over_other_documents_do_not_compete(tmp_path):
    plain = evaluation(ROWS[:1], paper=PAPER)
    page = page_of(tmp_path, plain, with_variant(["arc_easy", "piqa_untitled"], ROWS[1:]))
    assert "57.50" not in best_cells(page)
    first, *_, last = page.table("Scores")
    paper = dict(zip(first, last, strict=True))
    assert paper["Average mean of 2 ↑"] == "53.25"
    assert paper["Average mean of 2, with piqa_untitled ↑"] == "–"  # noqa: RUF001


def test_the_papers_average_needs_all_of_its_tasks(tmp_path):
    document = evaluation([("m", OTHER, 0.5, None, 9.0)], missing=["piqa"], paper=PAPER)
    document["columns"] = [c for c in document["columns"] if c["task"] != "piqa"]
    assert page_of(tmp_path, document).table("Scores")[-1][-1] == "–"  # noqa: RUF001


@pytest.mark.parametrize("change", [{"rows": 5}, {"missing": 5}, {"suite": {}}])
def test_a_file_of_another_shape_is_named(tmp_path, change):
    with pytest.raises(MidusError, match=r"0\.json is not a midus\.eval file this midus can show"):
        page_of(tmp_path, {**evaluation(ROWS), **change})


def test_a_row_whose_id_is_no_text_goes_by_its_name(tmp_path):
    document = evaluation(ROWS)
    document["rows"][0]["model_id"] = {"a": 1}
    assert [row[0] for row in page_of(tmp_path, document).table("Scores")[1:]] == ["base", "grown"]


def test_files_of_one_suite_make_one_table_and_other_limits_another(tmp_path):
    page = page_of(
        tmp_path,
        evaluation(ROWS[:1]),
        evaluation(ROWS[1:], command="another"),
        evaluation(ROWS[1:], limit=10),
    )
    headings = [h for h in page.headings() if h.startswith("Suite")]
    assert headings == ["Suite general", "Suite general, at most 10 documents a task"]
    first, second = page.all("table")
    assert len(first.find("tbody")[0].find("tr")) == 2
    assert len(second.find("tbody")[0].find("tr")) == 1


def test_a_newer_score_of_the_same_model_replaces_the_older(tmp_path):
    old = evaluation([("m", OTHER, 0.1, 0.1, 99.0)], date="2026-01-01T00:00:00+00:00")
    new = evaluation([("m", OTHER, 0.5, 0.5, 9.0)], date="2026-02-01T00:00:00+00:00")
    page = page_of(tmp_path, old, new)
    (_, row) = page.table("Scores")
    assert row[1].startswith("50.00")
    assert "1 older rows of the same models and tasks are left out" in page.root.text


def test_rows_of_targets_have_the_targets_names(stored, grown_id, tmp_path):
    rows = [("smollm2-135m", OTHER, 0.5, 0.5, 9.0), ("/somewhere/else", grown_id, 0.6, 0.6, 8.0)]
    page = page_of(tmp_path, evaluation(rows), targets=[str(stored / "grown")])
    assert [row[0] for row in page.table("Scores")[1:]] == ["smollm2-135m", "grown"]


def test_every_file_shows_its_conditions(tmp_path):
    page = page_of(
        tmp_path,
        evaluation(ROWS[:1], command="midus eval base --paper"),
        evaluation(ROWS[1:], command="midus eval grown", commit="c0ffee"),
    )
    for text in ("midus eval base --paper", "midus eval grown", "def456", "c0ffee", "a machine"):
        assert text in page.root.text

"""`midus report` end to end, and what a user can get wrong."""

import json

import pytest
from pages import Page, evaluation, heads, make_run, theorem, write_json


def assert_refused(result, *parts):
    assert result.code == 2, result.out + result.err
    assert result.err.startswith("midus: ")
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err


def test_report_says_what_it_found_and_what_not(midus, stored, grown_id, tmp_path):
    write_json(tmp_path / "analysis" / "heads.json", heads("m", grown_id))
    write_json(tmp_path / "analysis" / "x" / "heads.json", heads("other", "f" * 12))
    write_json(tmp_path / "analysis" / "theorem.json", theorem())
    result = midus("report", stored / "run", "-o", "out.html", "--title", "A & B")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "run: run (6 lines of metrics), stack (6 blocks), heads (1)"
    assert lines[1] == "  not found: eval, slots, theorem"
    assert lines[2] == "analysis/theorem.json: theorem, of no model"
    assert lines[3] == "ignored    results of other models: analysis/x/heads.json"
    assert lines[4].startswith("written    out.html (")
    page = Page((tmp_path / "out.html").read_text())
    assert page.all("h1")[0].text == "A & B"
    assert page.all("title")[0].text == "A & B"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_page_is_report_html_by_default(midus, stored, tmp_path):
    assert midus("report", stored / "base").code == 0
    assert (tmp_path / "report.html").is_file()


def test_a_missing_picture_is_told(midus, tmp_path):
    path = write_json(tmp_path / "heads.json", heads("m", "a" * 12))
    (tmp_path / "heads.png").unlink()
    assert "heads.png is missing or no PNG" in midus("report", path).out


def test_results_given_by_option_are_matched(midus, stored, grown_id, tmp_path):
    mine = write_json(tmp_path / "a.json", evaluation([("m", grown_id, 0.5, 0.5, 9.0)]))
    other = write_json(tmp_path / "b.json", evaluation([("m", "f" * 12, 0.5, 0.5, 9.0)]))
    out = midus("report", stored / "grown", "--results", mine, "--results", other).out
    assert "eval (1)" in out
    assert f"ignored    results of other models: {other}" in out


def test_a_report_is_replaced_and_another_file_is_not(midus, stored, tmp_path):
    target = tmp_path / "page.html"
    assert midus("report", stored / "base", "-o", target).code == 0
    first = target.read_text()
    assert midus("report", stored / "grown", "-o", target).code == 0
    assert target.read_text() != first
    target.write_text("<!doctype html><title>mine</title>")
    result = midus("report", stored / "grown", "-o", target)
    assert_refused(result, "page.html exists and is no report of midus", "--overwrite")
    assert target.read_text() == "<!doctype html><title>mine</title>"
    assert midus("report", stored / "grown", "-o", target, "--overwrite").code == 0
    assert "midus report" in target.read_text()


def test_a_page_that_quotes_a_report_is_no_report(midus, stored, tmp_path):
    target = tmp_path / "page.html"
    quote = '<meta name="generator" content="midus report 0.1.0">'
    target.write_text("<p>" + "x" * 2000 + quote)
    assert_refused(midus("report", stored / "base", "-o", target), "is no report")


def test_a_link_to_a_report_stays_a_link(midus, stored, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "real" / "page.html")
    assert midus("report", stored / "base", "-o", tmp_path / "link.html").code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "midus report" in (tmp_path / "real" / "page.html").read_text()


def test_output_that_is_a_folder_is_refused(midus, stored, tmp_path):
    (tmp_path / "folder").mkdir()
    assert_refused(midus("report", stored / "base", "-o", tmp_path / "folder"), "is a folder")


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("./nothing/here", ["nothing/here does not exist", "give a run, a model"]),
        ("no-such-model", ["no-such-model", "neither a local folder nor"]),
        ("nothing.json", ["nothing.json does not exist", "result's JSON"]),
        ("empty", ["empty holds no run (metrics.jsonl), no model (config.json) and no result"]),
        ("begun", ["begun is a run that has neither metrics nor a model yet"]),
        ("notes.txt", ["notes.txt is no run, model or result"]),
        ("broken.json", ["broken.json is not JSON (Expecting value: line 1 column 10"]),
        ("bad_line", ["metrics.jsonl, line 2 is not JSON (Expecting"]),
        ("no_step", ["metrics.jsonl, line 3 is no object with a step"]),
        ("bad_options", ["options.json is not JSON"]),
        ("bad_result", ["result.json holds no JSON object"]),
        ("bad_bytes", ["metrics.jsonl cannot be read", "utf-8"]),
    ],
)
def test_bad_targets_are_named_with_the_reason(midus, tmp_path, target, parts):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "options.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "broken.json").write_text('{"kind": ')
    line = json.dumps({"step": 1, "loss": 1.0}) + "\n"
    runs = ("bad_line", "no_step", "bad_options", "bad_result", "bad_bytes")
    for name in runs:
        make_run(tmp_path / name)
    (tmp_path / "bad_line" / "metrics.jsonl").write_text(f"{line}{{'step': 2}}\n{line}")
    (tmp_path / "no_step" / "metrics.jsonl").write_text(f'{line}{line}{{"loss": 1}}\n')
    (tmp_path / "bad_options" / "options.json").write_text("{,}")
    (tmp_path / "bad_result" / "result.json").write_text("[1]")
    (tmp_path / "bad_bytes" / "metrics.jsonl").write_bytes(b"\xff\xfe")
    assert_refused(midus("report", target), *parts)
    assert not (tmp_path / "report.html").exists()


def test_a_place_of_results_must_have_some(midus, stored, tmp_path):
    (tmp_path / "none").mkdir()
    refused = midus("report", stored / "base", "--results", tmp_path / "none")
    assert_refused(refused, "none holds no result")
    refused = midus("report", stored / "base", "--results", tmp_path / "nowhere")
    assert_refused(refused, "nowhere does not exist")

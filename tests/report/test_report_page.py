"""The page itself: whole, accessible, escaped, and nothing in it that needs a network."""

import json
import re
from itertools import pairwise

import pytest
from pages import (
    Page,
    evaluation,
    heads,
    make_png,
    make_run,
    result,
    slots,
    theorem,
    walk,
    write_json,
)

from midus.report import collect, render

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'


@pytest.fixture
def full(stored, grown_id, tmp_path):
    """A page with everything on it."""
    folder = tmp_path / "analysis"
    write_json(folder / "heads.json", heads("m", grown_id))
    write_json(folder / "slots.json", slots("m", grown_id))
    write_json(folder / "theorem.json", theorem())
    rows = [("base", "f" * 12, 0.5, 0.6, 20.0), ("m", grown_id, 0.55, 0.6, 18.5)]
    paper = [{"method": "SOLAR", "backbone": "1B", "stage": "CPT", "scores": {}, "average": 1.0}]
    write_json(folder / "eval.json", evaluation(rows, paper=paper))
    return render(collect([str(stored / "run"), str(stored / "base")]))


def test_every_part_has_its_heading(full):
    found = Page(full).headings()
    assert found == [
        "MIDUS report: run, base", "Overview", "Layer stacks", "run", "base", "Training",
        "Settings", "Evaluation", "Suite general", "Head importance", "run", "Memory slots", "run",
        "Shared and head-wise values: the theorem", "On random instances",
    ]  # fmt: skip


def test_what_is_missing_has_no_heading(stored):
    assert Page(render(collect([str(stored / "base")]))).headings() == [
        "MIDUS report: base",
        "Overview",
        "Layer stack",
    ]


def test_nothing_refers_to_anything_outside(full):
    for element in walk(Page(full).root):
        for name, value in element.attrs.items():
            if name in ("src", "href", "srcset", "action", "data", "xlink:href"):
                assert value.startswith(("data:", "#")), (element.tag, value)
        assert element.tag not in ("script", "iframe", "object", "embed", "form", "base")
    assert "@import" not in full
    assert not re.search(r"url\(", full)


def test_the_policy_allows_the_style_sheet_and_pictures_alone(full):
    import base64
    import hashlib

    page = Page(full)
    (policy,) = [m.attrs["content"] for m in page.all("meta") if "http-equiv" in m.attrs]
    (style,) = page.all("style")
    digest = base64.b64encode(hashlib.sha256(style.text.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not [e for e in walk(page.root) if "style" in e.attrs]  # the policy would drop them


def test_ids_are_unique_and_links_lead_to_them(full):
    page = Page(full)
    ids = [e.attrs["id"] for e in walk(page.root) if "id" in e.attrs]
    assert len(ids) == len(set(ids))
    links = [a.attrs["href"].removeprefix("#") for a in page.all("a")]
    labels = [
        name
        for e in walk(page.root)
        if "aria-labelledby" in e.attrs
        for name in e.attrs["aria-labelledby"].split()
    ]
    assert len(links) > 10
    assert {*links, *labels} <= set(ids)


def test_tables_have_captions_and_scopes(full):
    tables = Page(full).all("table")
    assert len(tables) > 8
    for table in tables:
        assert table.children[0].tag == "caption"
        assert table.children[0].text
        for cell in table.find("th"):
            assert cell.attrs["scope"] in ("col", "row", "rowgroup")
        widths = {len(row.children) for row in table.find("tr")}
        spans = {int(c.attrs["colspan"]) for c in table.find("th") if "colspan" in c.attrs}
        assert max(widths) in spans or len(widths) == 1
        assert table.parents[-1].attrs["class"] == "scroll"
        assert table.parents[-1].attrs["tabindex"] == "0"


def test_pictures_and_charts_say_what_they_show(full):
    page = Page(full)
    images = page.all("img")
    assert len(images) == 3
    for image in images:
        assert len(image.attrs["alt"]) > 40
        assert (image.attrs["width"], image.attrs["height"]) == ("3", "2")
    charts = [s for s in page.all("svg") if s.attrs.get("role") == "img"]
    assert len(charts) == 7
    for chart in charts:
        title, description = chart.children[:2]
        assert (title.tag, description.tag) == ("title", "desc")
        assert chart.attrs["aria-labelledby"] == f"{title.attrs['id']} {description.attrs['id']}"


def test_headings_go_down_one_level_at_a_time(full):
    levels = [int(e.tag[1]) for e in walk(Page(full).root) if re.fullmatch("h[1-6]", e.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_the_page_is_made_for_phones_and_readers(full):
    page = Page(full)
    (html,) = page.all("html")
    assert html.attrs["lang"] == "en"
    metas = {m.attrs.get("name"): m.attrs["content"] for m in page.all("meta") if "name" in m.attrs}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["color-scheme"] == "light dark"
    assert full.startswith("<!doctype html>")


def test_the_stack_has_a_cell_for_each_block(stored):
    page = Page(render(collect([str(stored / "grown")])))
    cells = [e for e in page.all("span") if "title" in e.attrs]
    assert [c.attrs["class"].split()[1] for c in cells] == (
        ["base", "memory", "base", "base", "memory", "base"]
    )
    assert cells[4].attrs["title"] == "block 4: memory from 3"
    assert [c.text for c in cells] == list("012345")


def test_parameters_are_those_of_inspect(midus, stored):
    facts = json.loads(midus("inspect", stored / "grown", "--json").out)
    rows = dict(Page(render(collect([str(stored / "grown")]))).table("Model and parameters"))
    params = facts["params"]
    assert rows["base parameters"] == f"{params['base']:,}"
    assert rows["trainable parameters"] == f"{params['trainable']:,}" == "6,208"
    assert rows["all parameters"] == f"{params['total']:,}"
    share = 100 * params["trainable"] / params["total"]
    assert rows["trainable, per cent of all"] == f"{share:.2f}"
    assert rows["slots of all heads and blocks"] == f"{facts['slots']:,}"


def test_training_is_told_in_numbers(stored):
    rows = dict(Page(render(collect([str(stored / "run")]))).table("What training came to"))
    assert rows["held-out perplexity before"] == "22.198"
    assert rows["held-out perplexity after"] == "18.174"
    assert rows["steps"] == "20"
    assert rows["tokens read"] == "1,280"
    assert rows["time"] == "10 min"
    assert rows["tokens per second, median"] == "112"


def test_an_unfinished_run_is_told_as_such(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "result.json").unlink()
    rows = dict(Page(render(collect([str(run)]))).table("What training came to"))
    assert rows["state"] == "not finished"
    assert rows["held-out loss after"] == "2.9000"
    assert rows["steps"] == "20"


def test_several_runs_stand_side_by_side(stored, tmp_path):
    other = make_run(tmp_path / "other", steps=40)
    page = Page(render(collect([str(stored / "run"), str(other)])))
    rows = page.table("What training came to")
    assert rows[0] == ["", "run", "other"]
    assert ["steps", "20", "40"] in rows
    assert ["held-out perplexity", "22.20 → 18.17", "22.20 → 18.17"] in page.table("At a glance")
    loss = next(f for f in page.all("figure") if f.text.strip().startswith("Loss"))
    assert len([g for g in loss.find("g") if "series" in g.attrs["class"]]) == 4 + 4  # and keys


def test_settings_show_where_runs_differ(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    options = json.loads((two / "options.json").read_text())
    (two / "options.json").write_text(json.dumps({**options, "odd": {"one": 7}}))
    rows = Page(render(collect([str(one), str(two)]))).table("Main settings")
    assert ["odd.one", "–", "7"] in rows  # noqa: RUF001  # not set


def test_numbers_of_heads_slots_and_theorem_are_in_tables(full):
    page = Page(full)
    assert ["mean importance", "0.1", "0.2"] in page.table(
        "Heads of the base's layers, before and after"
    )
    assert "1 of 2 layers have a higher variance" in page.root.text
    layers = page.table("Head importance by layer")
    assert layers[1] == ["0", "base 0", "0.3", "0.5 (head 1)", "0.04", "0.0025"]
    assert layers[2] == ["1", "memory (from 1)", "0.3", "0.3 (head 0)", "0", ""]
    use = page.table("Use of slots by memory block")
    assert use[1][:5] == ["1", "25.0 %", "0.500", "0.400", "20.0 %"]
    tokens = [e.text for e in page.all("code") if e.attrs.get("class") == "token"]
    assert tokens == ["␣the", "⏎", "␣the", "⏎", "␣sea", "⟨x⟩"]
    (_, slot) = page.table("Busiest slots of block 1")
    assert slot[0] == "head 2, slot 17"
    assert slot[2] == "␣the 2.0-fold ⏎ 2.0-fold"
    (mark,) = page.all("mark")
    assert mark.text == "the"
    assert mark.parents[-1].text.strip() == "over the sea & <b>"
    checks = dict(page.table("Checks on random instances")[1:])
    assert checks["equalities: largest relative error"] == "1.3e-15"


@pytest.mark.parametrize("place", ["title", "path", "json", "options", "metrics"])
def test_nothing_a_file_says_becomes_markup(stored, tmp_path, place):
    run = make_run(tmp_path / (EVIL.replace("/", "\u2044") if place == "path" else "run"))
    targets = [str(run)]
    if place == "json":
        document = evaluation([(EVIL, "a" * 12, 0.5, 0.5, 9.0)], suite=EVIL, command=EVIL)
        for column in document["columns"]:
            column["label"] = EVIL
        targets += [str(write_json(tmp_path / "e.json", document))]
        slot = slots(EVIL, "b" * 12)
        slot["busiest"]["slots"][0]["tokens"][0]["token"] = EVIL
        targets += [str(write_json(tmp_path / "s.json", slot))]
    if place == "options":
        (run / "options.json").write_text(json.dumps({"stage": EVIL, EVIL: EVIL}))
    if place == "metrics":
        lines = [{"step": i, "loss": 1.0, f"lr/{EVIL}": 0.1} for i in (1, 2)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = render(collect(targets), EVIL if place == "title" else None)
    page = Page(html)
    assert not page.all("script")
    assert not [e for e in walk(page.root) if "onerror" in e.attrs]
    assert "alert(1)" in page.root.text
    assert "{{ 7 * 7 }}" in page.root.text


def test_a_picture_that_is_missing_or_none_is_left_out(tmp_path):
    path = write_json(tmp_path / "heads.json", heads("m", "a" * 12))
    (tmp_path / "heads.png").write_text("no picture")
    assert Page(render(collect([str(path)]))).all("img") == []
    (tmp_path / "heads.png").unlink()
    assert Page(render(collect([str(path)]))).all("img") == []


def test_a_result_cannot_bring_in_files_from_elsewhere(tmp_path):
    (tmp_path / "secret.png").write_bytes(make_png())
    document = {**heads("m", "a" * 12), "figures": []}
    path = write_json(tmp_path / "below" / "heads.json", document)
    path.write_text(json.dumps({**document, "figures": ["../secret.png"]}))
    assert Page(render(collect([str(path)]))).all("img") == []


def test_long_logs_do_not_make_long_pages(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "loss": 2 + (step * 7919 % 97) / 97}) + "\n")
    html = render(collect([str(run)]))
    assert len(html) < 60_000


def test_a_result_with_fields_of_another_shape_is_named(tmp_path):
    from midus.errors import MidusError

    for kind in ("heads", "slots", "theorem", "eval"):
        path = write_json(tmp_path / f"{kind}.json", {**result(kind, "m", "a" * 12), "figures": []})
        with pytest.raises(MidusError, match=rf"{kind}\.json is not a midus\.{kind} file"):
            render(collect([str(path)]))


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_the_contrast_of_wcag_aa(full, scheme):
    (style,) = Page(full).all("style")
    light, dark = re.findall(r":root \{(.*?)\}", style.text, re.DOTALL)[:2]
    names = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        names |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark))
    for ground in ("page", "card"):
        for text in ("ink", "soft", "link"):
            assert contrast(names[text], names[ground]) >= 4.5, (text, ground)
        for line in [f"c{i}" for i in range(6)]:
            assert contrast(names[line], names[ground]) >= 3, (line, ground)
    assert contrast(names["ink"], names["mark"]) >= 4.5
    assert contrast(names["base-ink"], names["base"]) >= 4.5
    for kind in ("memory", "copy"):
        assert contrast(names["on-colour"], names[kind]) >= 4.5, kind


def test_a_slot_that_half_of_the_tokens_read_is_a_hub(tmp_path):
    document = slots("m", "a" * 12)
    (hub,) = document["busiest"]["slots"]
    document["busiest"]["slots"] = [{**hub, "count": 512}, {**hub, "slot": 3, "count": 511}]
    page = Page(render(collect([str(write_json(tmp_path / "s.json", document))])))
    rows = page.table("Busiest slots of block 1")
    assert [row[0] for row in rows[1:]] == ["head 2, slot 17 hub", "head 2, slot 3"]


def test_variances_of_a_layer_stand_beside_those_of_its_own_block_in_the_base(tmp_path):
    document = heads("m", "a" * 12)
    kinds = [("base", 0), ("memory", 1), ("base", 1), ("base", 2)]
    document["layers"]["model"] = [
        {"index": i, "base_index": base, "kind": kind} for i, (kind, base) in enumerate(kinds)
    ]
    document["importance"]["model"] = [[0.1, 0.5]] * 4
    document["variance"] = {"base": [0.11, 0.12, 0.13], "model": [0.21, 0.22, 0.23, 0.24]}
    page = Page(render(collect([str(write_json(tmp_path / "h.json", document))])))
    rows = page.table("Head importance by layer")
    assert [(row[1], *row[4:]) for row in rows[1:]] == [
        ("base 0", "0.21", "0.11"),
        ("memory (from 1)", "0.22", ""),
        ("base 1", "0.23", "0.12"),
        ("base 2", "0.24", "0.13"),
    ]


@pytest.mark.parametrize("change", [{"conditions": None}, {"tokens": "x"}, {"tokens": None}])
def test_a_result_of_a_run_that_lacks_something_is_shown(tmp_path, change):
    run = make_run(tmp_path / "run")
    values = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**values, **change}))
    rows = dict(Page(render(collect([str(run)]))).table("What training came to")[1:])
    assert rows["steps"] == "20"


def test_headings_of_scores_may_wrap(full):
    (style,) = Page(full).all("style")
    (rule,) = re.findall(r"thead small \{(.*?)\}", style.text)
    assert "nowrap" not in rule

"""A real browser shows the page: on a phone, on a screen, light and dark, and on paper."""

import pytest
from chromium import EXECUTABLE, browser
from pages import evaluation, heads, make_png, make_run, slots, theorem, write_json

from midus.report import collect, render

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        EXECUTABLE is None, reason="needs chromium, chromium-browser or google-chrome on the PATH"
    ),
]
LONG = "/a/very/long/path/without/any/space/" + "x" * 200


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def path(stored, grown_id, tmp_path):
    """A page with everything on it, long words and wide tables among it."""
    folder = tmp_path / "analysis"
    write_json(folder / "heads.json", {**heads("m", grown_id), "command": LONG})
    (folder / "heads.png").write_bytes(make_png(1600, 600))
    write_json(folder / "slots.json", {**slots("m", grown_id), "text": LONG})
    write_json(folder / "theorem.json", theorem())
    rows = [(LONG, "f" * 12, 0.5, 0.6, 20.0), ("m", grown_id, 0.55, 0.6, 18.5)]
    document = evaluation(rows, suite=LONG)
    for i in range(12):
        document["columns"].append({**document["columns"][0], "task": f"t{i}", "label": f"T{i}"})
    write_json(folder / "eval.json", document)
    other = make_run(tmp_path / ("o" * 90), steps=400, every=1)
    html = render(collect([str(stored / "run"), str(other), str(stored / "base")]), f"T {LONG}")
    (tmp_path / "report.html").write_text(html)
    return tmp_path / "report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 1200])
def test_the_page_shows_without_scrolling_sideways_or_asking_for_anything(
    chromium, path, width, dark
):
    chromium.open(path, width=width, dark=dark)
    assert chromium.value("document.title").startswith("T /a/very")
    assert chromium.requests() == []
    assert chromium.complaints() == []
    assert chromium.value("innerWidth") == width
    assert chromium.value("document.documentElement.scrollWidth") <= width
    assert chromium.value("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert chromium.value("document.querySelectorAll('svg .line').length") > 10
    ground = chromium.value("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 21, 27)" if dark else "rgb(255, 255, 255)")


def test_details_open_without_scrolling_the_page_sideways(chromium, path):
    chromium.open(path, width=360)
    chromium.value("document.querySelectorAll('details').forEach(d => d.open = true) || 0")
    assert chromium.value("document.querySelectorAll('details[open]').length") > 3
    assert chromium.value("document.documentElement.scrollWidth") <= 360


def test_lines_have_the_colours_of_the_scheme(chromium, path):
    colours = set()
    for dark in (False, True):
        chromium.open(path, dark=dark)
        colours.add(
            chromium.value("getComputedStyle(document.querySelector('svg .c0 .line')).stroke")
        )
    assert colours == {"rgb(109, 40, 217)", "rgb(167, 139, 250)"}


def test_the_policy_stops_what_a_page_must_not_do(chromium, path):
    # Proof that the policy works: the same page with a script and a picture from elsewhere.
    evil = path.with_name("evil.html")
    injected = "<script>document.title = 'run'</script><img src='http://localhost:9/x.png' alt=''>"
    evil.write_text(path.read_text().replace("</main>", f"{injected}</main>"))
    chromium.open(evil)
    assert chromium.value("document.title") != "run"
    complaints = " ".join(str(complaint) for complaint in chromium.complaints())
    assert complaints.count("Content Security Policy") >= 2


def test_on_paper_nothing_is_cut_off(chromium, path):
    chromium.open(path, width=760, dark=True, media="print")
    assert chromium.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert chromium.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    widest = "Math.max(...[...document.querySelectorAll('img, svg, pre')].map(e => e.clientWidth))"
    assert chromium.value(widest) <= 760
    line = "getComputedStyle(document.querySelector('svg .c0 .line')).stroke"
    assert chromium.value(line) == "rgb(109, 40, 217)"  # paper is white, whatever the screen
    assert chromium.call("Page.printToPDF")["data"].startswith("JVBERi0")  # %PDF-


def test_the_keyboard_reaches_links_tables_and_details(chromium, path):
    chromium.open(path, width=390)
    reached = set()
    for _ in range(60):
        for kind in ("rawKeyDown", "keyUp"):
            chromium.call(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
        reached.add(chromium.value("document.activeElement.tagName"))
    assert {"A", "DIV", "SUMMARY"} <= reached

"""Links of the documents lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(path):
    """What GitHub calls the headings of a document."""
    text = FENCE.sub("", path.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path):
    """The links of one document that lead nowhere in this repository."""
    broken = []
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        if "://" in link:
            continue
        target, _, heading = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (heading and heading not in anchors(file)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


@pytest.mark.parametrize("folder", ["benchmarks", "configs", "examples", "src", "studies", "tests"])
def test_pages_that_comments_name_exist(folder):
    files = [path for end in ("py", "yaml") for path in (ROOT / folder).rglob(f"*.{end}")]
    named = {page for path in files for page in re.findall(r"docs/[\w./-]+\.md", path.read_text())}
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: 3.5\n[a](#one-two-35) [b](#gone) [c](page.md#one-two-35) [d](no.md)"
    )
    assert broken_links(page) == ["#gone", "no.md"]

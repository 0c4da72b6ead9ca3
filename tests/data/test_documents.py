"""Reading documents: every kind of file, and rows that cannot be used."""

import gzip
import json
import lzma

import pytest

from midus.data.documents import read_documents
from midus.data.options import SourceOptions
from midus.data.rows import NUM_NAMED, BadRows, list_files, read_rows
from midus.errors import MidusError

TEXTS = ["w4 w5", "first\u2028second\u0085third\x0cfourth", "w6\nw7"]
LINES = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in TEXTS).encode()


def packed(path):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(LINES))
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(LINES))
    elif path.suffix == ".zst":
        import zstandard

        half = LINES.index(b"\n") + 5  # two frames, cut in the middle of a line
        pack = zstandard.ZstdCompressor().compress
        path.write_bytes(pack(LINES[:half]) + pack(LINES[half:]))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    else:
        path.write_bytes(LINES)
    return path


def read(path, **options):
    bad = BadRows()
    found = list(read_documents(SourceOptions(path=str(path), **options), bad))
    return [text for text, _ in found], [where for _, where in found], bad


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.json", "a.parquet"]
)
def test_every_kind_of_file_gives_its_texts(tmp_path, name):
    path = packed(tmp_path / name)
    texts, places, bad = read(path)
    assert texts == TEXTS
    assert places == [f"{path}:{number}" for number in (1, 2, 3)]
    assert bad.count == 0


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "b.txt").write_text("w4\nw5\n")
    (tmp_path / "a.txt").write_text("w6")
    (tmp_path / "c.dat").write_text("not text")
    texts, _, _ = read(tmp_path, text_field="body")
    assert texts == ["w6", "w4\nw5\n"]


def test_patterns_are_read_in_the_order_of_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert read(tmp_path / "[ac].txt")[0] == ["a", "c"]


def test_bad_rows_are_counted_and_named(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        b'{"text": "good"}',
        b'{"text": "cut',
        b'{"body": "other field"}',
        b'{"text": 3}',
        b'{"text": " "}',
        b'["text"]',
        b"",
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": null}',
        b'{"text": "also good"}',
    ]
    path.write_bytes(b"\n".join(rows))
    texts, _, bad = read(path)
    assert texts == ["good", "also good"]
    assert bad.count == 8
    reasons = {number: reason for number, _, reason in bad.named}
    assert list(reasons) == [2, 3, 4, 5, 6, 8, 9, 10]
    assert bad.named[0][1] == f"{path}:2"
    assert "invalid JSON" in reasons[2]
    assert reasons[3] == "no field 'text'"
    assert reasons[4] == "field 'text' is a int, not a text"
    assert reasons[5] == "field 'text' is empty"
    assert reasons[8] == "not UTF-8"
    assert reasons[9] == "field 'text' is not valid Unicode"


def test_only_the_first_bad_rows_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 50)
    assert read(path)[2].count == 50
    assert len(read(path)[2].named) == NUM_NAMED


def test_stripes_share_out_the_rows(tmp_path):
    path = packed(tmp_path / "a.jsonl")
    parts = [[row.number for row in read_rows(path, stripe, 2)] for stripe in (0, 1)]
    assert parts == [[1, 3], [2]]


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.jsonl.gz", "a.parquet"])
def test_a_truncated_file_is_refused(tmp_path, name):
    path = packed(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(MidusError, match="cannot be read to its end"):
        read(path)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("no/such/file.jsonl", "does not exist"),
        ("no/such/folder", "does not exist"),
        ("*.jsonl", "holds no files"),
        (".", "holds no files"),
    ],
)
def test_sources_that_hold_nothing_are_refused(tmp_path, monkeypatch, path, part):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MidusError, match=part):
        list_files(SourceOptions(path=path))


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    path = packed(tmp_path / "a.jsonl.zst")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MidusError, match=r"needs the package zstandard; run: pip install midus\["):
        read(path)


def test_a_parquet_file_without_the_field_is_all_bad_rows(tmp_path):
    texts, _, bad = read(packed(tmp_path / "a.parquet"), text_field="body")
    assert texts == []
    assert [reason for _, _, reason in bad.named] == ["no field 'body'"] * 3


def test_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text\n")
    with pytest.raises(MidusError, match=r"a\.csv is of an unknown kind; known kinds: \.jsonl"):
        list_files(SourceOptions(path=str(tmp_path / "a.csv")))


def test_hub_options_are_refused_for_local_files(tmp_path):
    (tmp_path / "a.txt").write_text("w4")
    with pytest.raises(MidusError, match="files='x' is an option of hub datasets"):
        list_files(SourceOptions(path=str(tmp_path), files="x"))

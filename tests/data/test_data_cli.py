"""`midus data build` and `midus data info` as a user meets them."""

import json
import subprocess
import sys

import pytest
from corpora import contents, sentences, write_lines


@pytest.fixture
def corpus(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", sentences(200))
    with path.open("a") as file:
        file.write("{\n")
    return path


def test_build_then_info(tmp_path, midus, model, corpus):
    out = tmp_path / "out"
    made = midus("data", "build", corpus, "--tokenizer", model, "--out", out, "--tokens", 400)
    assert made.code == 0, made.err
    assert made.err == ""
    assert "400" in made.out
    assert f"bad row    {corpus}:201: invalid JSON" in made.out
    shown = midus("data", "info", out)
    assert shown.code == 0
    assert shown.out == made.out
    manifest = json.loads(midus("data", "info", out, "--json").out)
    assert manifest == json.loads((out / "manifest.json").read_text())


def test_the_same_command_gives_the_same_bytes(tmp_path, midus, model, corpus):
    command = ["data", "build", corpus, "--tokenizer", model, "--tokens", "400"]
    for name, workers in (("a", 1), ("b", 2)):
        assert midus(*command, "--out", tmp_path / name, "--workers", workers).code == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_weights_and_several_sources(tmp_path, midus, model, corpus):
    other = write_lines(tmp_path / "b.jsonl", sentences(200, seed=1))
    command = ["data", "build", corpus, other, "--tokenizer", model, "--workers", 1]
    made = midus(*command, "--out", tmp_path / "out", "--tokens", 1_000, "--weights", "9,1")
    assert made.code == 0, made.err
    sources = json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"]
    assert [source["train"]["tokens"] for source in sources] == [900, 100]


def test_sources_that_are_too_short_are_said(tmp_path, midus, model, corpus):
    short = write_lines(tmp_path / "b.jsonl", sentences(3, seed=1))
    command = ["data", "build", corpus, short, "--tokenizer", model, "--workers", 1]
    mixed = midus(*command, "--out", tmp_path / "mixed", "--tokens", 1_000, "--weights", "1,1")
    assert mixed.code == 0, mixed.err
    (note,) = [line for line in mixed.out.splitlines() if line.startswith("note")]
    assert "source 2 has" in note
    assert "its weight asks for 500" in mixed.out.replace("\n", " ")
    all_of_it = midus(*command, "--out", tmp_path / "all", "--tokens", 10**9)
    assert "are all there are, and 1,000,000,000 were asked for" in all_of_it.out.replace("\n", " ")
    assert "note" not in midus(*command, "--out", tmp_path / "some", "--tokens", 300).out


def test_info_of_files_that_are_others_is_refused(tmp_path, midus, model, corpus):
    out = tmp_path / "out"
    assert midus("data", "build", corpus, "--tokenizer", model, "--out", out).code == 0
    path = out / "train-00000.bin"
    tokens = bytearray(path.read_bytes())
    tokens[10:14] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(tokens))
    told = midus("data", "info", out)
    assert told.code == 2
    assert "is not what its manifest says (sha256" in told.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["nothing.jsonl"], ["nothing.jsonl does not exist"]),
        (["CORPUS", "--held-out", "1.5"], ["held_out=1.5 must be a share"]),
        (["CORPUS", "--tokens", "0"], ["max_tokens=0"]),
        (["CORPUS", "--executor", "spark"], ["executor='spark' is unknown"]),
        (["CORPUS", "--executor", "slurm"], ["--slurm-partition"]),
        (["CORPUS", "--text-field", "body"], ["no usable documents", "no field 'body'"]),
        (["CORPUS", "--weights", "1,2"], ["weights='1,2' is no list of 1 numbers"]),
        (["CORPUS", "--name", "part"], ["name='part' is an option of hub datasets"]),
        (["CORPUS", "--tokenizer", "no_such/model"], ["no_such/model is no model"]),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, midus, model, corpus, options, parts):
    options = [str(corpus) if option == "CORPUS" else option for option in options]
    if "--tokenizer" not in options:
        options += ["--tokenizer", str(model)]
    before = sorted(tmp_path.iterdir())
    result = midus("data", "build", *options, "--out", tmp_path / "out", "--workers", 1)
    assert result.code == 2, result.out + result.err
    assert result.err.startswith("midus: ")
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err
    assert sorted(tmp_path.iterdir()) == before


def test_info_of_another_folder_is_refused(tmp_path, midus, model):
    result = midus("data", "info", model)
    assert result.code == 2
    assert "is not a token folder" in result.err


def test_reading_tokens_needs_numpy_and_torch_only():
    code = (
        "import sys\n"
        "for name in ('datasets', 'datatrove', 'pyarrow', 'transformers', 'tokenizers', 'trl'):\n"
        "    sys.modules[name] = None\n"
        "from midus.data import TokenDataset, MixtureDataset, DataOptions\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Builds: the same bytes every time, by whoever; nothing half made; streams and clusters."""

import json

import numpy as np
import pytest
from corpora import EOS, contents, documents, sentences, write_lines

from midus.data import steps
from midus.data.build import build_tokens
from midus.data.executors import SlurmOptions, make_executors
from midus.data.options import SourceOptions
from midus.data.plan import BuildPlan, find_inputs, shares_of
from midus.errors import MidusError


@pytest.fixture
def corpus(tmp_path):
    """Two files of 60 documents, nine words each."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = sentences(120)
    write_lines(folder / "a.jsonl", texts[:60])
    write_lines(folder / "b.jsonl", texts[60:])
    return folder, texts


def build(path, model, out, **options):
    return build_tokens([SourceOptions(path=str(path))], model, out, **options)


def words(text):
    return [int(word[1:]) for word in text.split()]


def test_every_document_once_and_ended(tmp_path, model, corpus):
    folder, texts = corpus
    made = build(folder, model, tmp_path / "out", held_out=0.2)
    train, held_out = documents(made.path, "train"), documents(made.path, "held_out")
    assert sorted(train + held_out) == sorted(map(words, texts))
    assert 10 < len(held_out) < 40
    assert train != sorted(train)  # shuffled
    assert made.num_tokens("train") == 10 * len(train)
    assert made.manifest["splits"]["held_out"]["documents"] == len(held_out)
    source = made.manifest["sources"][0]
    assert source["documents_read"] == 120
    assert [len(entry["sha256"]) for entry in source["inputs"]] == [64, 64]
    assert made.manifest["tokenizer"]["eos_token_id"] == EOS
    assert made.manifest["dtype"] == "uint16"


@pytest.mark.parametrize("max_tokens", [None, 333])
def test_bytes_do_not_depend_on_tasks(tmp_path, model, corpus, max_tokens):
    folder, _ = corpus
    made = [
        contents(
            build(folder, model, tmp_path / f"{tasks}", max_tokens=max_tokens, tasks=tasks).path
        )
        for tasks in (1, 2, 5)
    ]
    assert made[0] == made[1] == made[2]


def test_bytes_do_not_depend_on_workers(tmp_path, model, corpus):
    folder, _ = corpus
    one = build(folder, model, tmp_path / "one", max_tokens=500, workers=1)
    two = build(folder, model, tmp_path / "two", max_tokens=500, workers=2)
    assert contents(one.path) == contents(two.path)


def test_the_seed_changes_the_order_and_not_what_is_held_out(tmp_path, model, corpus):
    folder, _ = corpus
    a = build(folder, model, tmp_path / "a", held_out=0.2).path
    b = build(folder, model, tmp_path / "b", held_out=0.2, seed=1).path
    assert documents(a, "train") != documents(b, "train")
    for split in ("train", "held_out"):
        assert sorted(documents(a, split)) == sorted(documents(b, split))


def test_equal_documents_are_held_out_together(tmp_path, model):
    path = write_lines(tmp_path / "a.jsonl", sentences(50) * 2)
    made = build(path, model, tmp_path / "out", held_out=0.3).path
    train, held_out = (set(map(tuple, documents(made, s))) for s in ("train", "held_out"))
    assert held_out
    assert not train & held_out


def test_a_token_count_is_met_exactly(tmp_path, model, corpus):
    folder, texts = corpus
    made = build(folder, model, tmp_path / "out", max_tokens=333, eval_tokens=7, held_out=0.2)
    assert (made.num_tokens("train"), made.num_tokens("held_out")) == (333, 7)
    *whole, cut = documents(made.path, "train")
    everything = list(map(words, texts))
    assert all(document in everything for document in whole)
    assert len(cut) == 2  # 333 = 33 * 10 + 2 and EOS


def test_a_wrong_guess_of_text_a_token_changes_nothing(tmp_path, model):
    # Words of 300 letters: the first choice of documents is far too small.
    texts = [f"{'x' * 300} {text}" for text in sentences(80, length=2)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    chosen = build(path, model, tmp_path / "chosen", max_tokens=200, held_out=0).path
    everything = build(path, model, tmp_path / "everything", held_out=0).path
    taken = np.fromfile(chosen / "train-00000.bin", "<u2")
    assert len(taken) == 200
    assert taken.tolist() == np.fromfile(everything / "train-00000.bin", "<u2")[:200].tolist()


def test_files_hold_shard_tokens_each(tmp_path, model, corpus):
    folder, _ = corpus
    whole = build(folder, model, tmp_path / "whole", held_out=0)
    cut = build(folder, model, tmp_path / "cut", held_out=0, shard_tokens=512)
    sizes = [file["bytes"] // 2 for file in cut.manifest["splits"]["train"]["files"]]
    assert sizes == [512, 512, 176]
    joined = b"".join(path.read_bytes() for path in cut.files("train"))
    assert joined == whole.files("train")[0].read_bytes()


def test_weights_share_out_the_tokens(tmp_path, model, corpus):
    folder, _ = corpus
    sources = [
        SourceOptions(path=str(folder / "a.jsonl"), weight=3),
        SourceOptions(path=str(folder / "b.jsonl")),
    ]
    made = build_tokens(sources, model, tmp_path / "out", max_tokens=400, held_out=0)
    assert [s["train"]["tokens"] for s in made.manifest["sources"]] == [300, 100]
    with pytest.raises(MidusError, match="give that number with --tokens"):
        build_tokens(sources, model, tmp_path / "no")


def test_a_pool_gives_in_proportion_to_size(tmp_path, model):
    sizes = {"small.jsonl": 20, "large.jsonl": 180}
    for seed, (name, count) in enumerate(sizes.items()):
        write_lines(tmp_path / name, sentences(count, seed))
    sources = [SourceOptions(path=str(tmp_path / name)) for name in sizes]
    made = build_tokens(
        sources, model, tmp_path / "out", max_tokens=1_000, held_out=0, by_weight=False
    )
    small, large = (source["train"]["tokens"] for source in made.manifest["sources"])
    assert small + large == 1_000
    assert 30 <= small <= 190


def test_shares_add_up():
    assert shares_of(100, [1, 1, 1]) == [33, 34, 33]
    assert shares_of(None, [1, 2]) == [None, None]


def test_bad_rows_are_named_whoever_reads_them(tmp_path, model):
    lines = [json.dumps({"text": text}) for text in sentences(30)]
    lines[4], lines[11], lines[20] = "{", '{"text": 5}', '{"text": ""}'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    made = [build(path, model, tmp_path / f"{tasks}", tasks=tasks).manifest for tasks in (1, 4)]
    assert made[0] == made[1]
    bad = made[0]["bad_rows"]
    assert bad["count"] == made[0]["sources"][0]["bad_rows"] == 3
    assert [row["where"] for row in bad["first"]] == [f"{path}:{n}" for n in (5, 12, 21)]
    assert "is empty" in bad["first"][2]["reason"]


def test_sources_without_text_are_refused(tmp_path, model):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "w4"}\n' * 3)
    with pytest.raises(MidusError) as error:
        build(path, model, tmp_path / "out")
    assert f"3 rows are bad, the first at {path}:1 (no field 'text')" in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


@pytest.mark.parametrize("step", ["ReadDocuments.run", "TokenizeDocuments.run", "put_in_place"])
def test_a_build_that_fails_leaves_nothing(tmp_path, model, corpus, monkeypatch, step):
    def fail(*_, **__):
        raise RuntimeError("power cut")

    monkeypatch.setattr(f"midus.data.steps.{step}", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        build(corpus[0], model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_an_existing_folder_is_replaced_only_on_request(tmp_path, model, corpus):
    folder, _ = corpus
    out = tmp_path / "out"
    first = contents(build(folder, model, out).path)
    with pytest.raises(MidusError, match="exists; choose another folder or pass --overwrite"):
        build(folder, model, out, seed=1)
    assert contents(out) == first
    assert contents(build(folder, model, out, seed=1, overwrite=True).path) != first
    with pytest.raises(MidusError, match="is not a token folder, so it is not overwritten"):
        build(folder, model, folder, overwrite=True)


def test_a_failed_replacement_keeps_the_old_folder(tmp_path, model, corpus, monkeypatch):
    first = contents(build(corpus[0], model, tmp_path / "out").path)
    monkeypatch.setattr(steps, "merge", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(corpus[0], model, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == first


def test_left_overs_of_dead_builds_are_swept(tmp_path, model, corpus):
    import platform

    dead = tmp_path / f".out.building-{platform.node()[:40]}-999999999-ab"
    dead.mkdir()
    build(corpus[0], model, tmp_path / "out")
    assert not dead.exists()


class Stream(list):
    """A streamed dataset that tells how far it was read."""

    def __iter__(self):
        for self.position, row in enumerate(super().__iter__(), start=1):
            yield row


@pytest.fixture
def hub(monkeypatch):
    import datasets

    stream = Stream({"text": text} for text in sentences(3_000))
    stream[1] = {"text": None}
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options))
        return stream

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("midus.data.plan.hub_revision", lambda _: "abc")
    return stream, asked


def test_a_hub_dataset_is_read_as_far_as_needed(tmp_path, model, hub):
    stream, asked = hub
    source = SourceOptions(path="org/texts", name="part", files="a/*, b/*")
    made = build_tokens([source], model, tmp_path / "out", max_tokens=2_500)
    assert made.num_tokens("train") == 2_500
    assert stream.position < 400
    path, options = asked[0]
    assert path == "org/texts"
    assert options["name"] == "part"
    assert options["data_files"] == ["a/*", "b/*"]
    assert options["revision"] == "abc"
    assert options["streaming"] is True
    entry = made.manifest["sources"][0]
    assert entry["revision"] == "abc"
    assert entry["bad_rows"] == 1
    assert made.manifest["bad_rows"]["first"][0]["where"] == "org/texts:2"


def test_streams_and_files_mix_whatever_the_tasks(tmp_path, model, hub, corpus):
    sources = [SourceOptions(path=str(corpus[0])), SourceOptions(path="org/texts", weight=4)]
    made = [
        contents(
            build_tokens(sources, model, tmp_path / f"{tasks}", max_tokens=5_000, tasks=tasks).path
        )
        for tasks in (1, 3)
    ]
    assert made[0] == made[1]
    with pytest.raises(MidusError, match="org/texts is a stream"):
        build_tokens(sources, model, tmp_path / "no", max_tokens=5_000, by_weight=False)


def test_an_unreachable_hub_dataset_is_one_sentence(tmp_path, model):
    with pytest.raises(MidusError, match="no_such/dataset is neither local nor a hub dataset"):
        build("no_such/dataset", model, tmp_path / "out", max_tokens=5)
    assert not list(tmp_path.iterdir())


def with_tokenizer(folder, add_bos, num_words=99):
    """A tokenizer that may add BOS and EOS itself, with as many words as asked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, num_words))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_bos_is_added_where_the_tokenizer_adds_it(tmp_path, corpus):
    folder = with_tokenizer(tmp_path / "bos", add_bos=True)
    made = build(corpus[0], folder, tmp_path / "out", held_out=0)
    assert made.manifest["tokenizer"]["bos_token_id"] == 1
    for document in documents(made.path, "train"):
        assert document[0] == 1
        assert 1 not in document[1:]
        assert len(document) == 10


def test_a_large_vocabulary_is_stored_as_uint32(tmp_path):
    folder = with_tokenizer(tmp_path / "large", add_bos=False, num_words=65_537)
    path = write_lines(tmp_path / "a.jsonl", ["w65536 w4"])
    made = build(path, folder, tmp_path / "out", held_out=0)
    assert made.manifest["dtype"] == "uint32"
    assert np.fromfile(made.files("train")[0], "<u4").tolist() == [65_536, 4, 2]


def test_a_tokenizer_without_end_is_refused(tmp_path, model, corpus):
    folder = with_tokenizer(tmp_path / "endless", add_bos=False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(MidusError, match="has no EOS token"):
        build(corpus[0], folder, tmp_path / "out")


@pytest.mark.parametrize("executor", ["local", "ray", "slurm"])
def test_every_executor_gets_the_same_pipeline(tmp_path, model, corpus, executor):
    from midus.data.encoding import read_encoding

    sources = (SourceOptions(path=str(corpus[0])),)
    plan = BuildPlan(
        sources=sources,
        inputs=find_inputs(sources, pooled=False),
        encoding=read_encoding(model),
        max_tokens=100,
        held_out=0.01,
        eval_tokens=100,
        seed=0,
        shard_tokens=1_000,
        by_weight=True,
        out=str(tmp_path / "out"),
        overwrite=False,
        work=str(tmp_path / "work"),
        tasks=6,
        workers=3,
    )
    made = make_executors(plan, executor, SlurmOptions(partition="cpu", time="01:00:00"))
    assert list(made) == ["survey", "tokenize", "merge"]
    assert [type(e).__name__.lower() for e in made.values()] == [f"{executor}pipelineexecutor"] * 3
    assert [(e.tasks, e.workers) for e in made.values()] == [(6, 3), (6, 3), (1, 1)]
    names = [[type(step).__name__ for step in e.pipeline] for e in made.values()]
    assert names == [
        ["ReadDocuments", "SurveyDocuments"],
        ["ReadDocuments", "TokenizeDocuments"],
        ["MergeTokens"],
    ]
    if executor == "slurm":
        assert made["merge"].depends is made["tokenize"]
        assert made["tokenize"].depends is made["survey"]
        assert made["survey"].partition == "cpu"


def test_slurm_submits_the_three_jobs_in_their_order(tmp_path, model, corpus, monkeypatch):
    from datatrove.executor import slurm

    submitted = []

    def launch(script, _, *args):
        submitted.append((script, args))
        return str(len(submitted))

    monkeypatch.setattr(slurm, "launch_slurm_job", launch)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/sbatch")
    made = build(
        corpus[0],
        model,
        tmp_path / "out",
        max_tokens=50,
        tasks=2,
        executor="slurm",
        slurm=SlurmOptions(partition="cpu"),
    )
    assert made is None
    jobs = [(script, args) for script, args in submitted if "merge_stats" not in script]
    stages = ("survey", "tokenize", "merge")
    assert len(jobs) == 3
    assert all(f"midus-{stage}" in script for stage, (script, _) in zip(stages, jobs, strict=True))
    assert [any("dependency" in arg for arg in args) for _, args in jobs] == [False, True, True]

    # What the jobs run on the cluster, here one after another.
    import dill

    monkeypatch.setattr(slurm.SlurmPipelineExecutor, "_set_distributed_environment", print)
    for stage, tasks in (("survey", 2), ("tokenize", 2), ("merge", 1)):
        (stored,) = tmp_path.glob(f".out.slurm-*/logs/{stage}/executor.pik")
        with stored.open("rb") as file:
            job = dill.load(file)
        for rank in range(tasks):
            job._run_for_rank(rank)
    local = build(corpus[0], model, tmp_path / "local", max_tokens=50)
    assert contents(tmp_path / "out") == contents(local.path)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"executor": "spark"}, "executor='spark' is unknown; choose one of local, ray, slurm"),
        ({"executor": "slurm"}, "add --slurm-partition"),
        ({"executor": "ray"}, "needs the package ray"),
        ({"held_out": 2}, "held_out=2"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"workers": 0}, "workers=0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(tmp_path, model, options, part):
    with pytest.raises(MidusError, match=part):
        build("nothing.jsonl", model, tmp_path / "out", **options)

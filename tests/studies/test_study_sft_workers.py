"""Several processes on one fine-tuning: each model once, the same rows, no shared speeds."""

import json
import multiprocessing
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from filelock import FileLock
from small import Ticks
from small_sft import FakeTasks, rows_of

from midus.errors import MidusError
from midus.studies import sft as sft_module
from midus.studies.finalists import find_finalists
from midus.studies.folder import read_study_folder
from midus.studies.presence import device_name
from midus.studies.results import add_result
from midus.studies.sft import run_sft
from midus.studies.sft_options import Sft
from midus.studies.sft_report import make_sft_report, to_markdown
from midus.studies.sft_run import SftCallback
from midus.studies.timing import Deadline

CHANGING = ("seconds", "tokens_per_second", "conditions", "options")
ONE = {"only": ["hml"], "seeds": [100]}


def lasting(rows):
    """By key, without what is of the moment and the place."""
    return {row["key"]: {k: v for k, v in row.items() if k not in CHANGING} for row in rows}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(sft_module, "_WAIT", 0.01)


@contextmanager
def at_work(folder):
    """Another process at work in the folder, as its locks show it."""
    (folder / ".workers").mkdir(exist_ok=True)
    with FileLock(folder / ".workers" / f"0@{device_name(torch.device('cpu'))}"):
        yield


@pytest.fixture
def other(copied):
    with at_work(copied):
        yield


@pytest.fixture(scope="module")
def alone(study_folder, config, tmp_path_factory):
    """Rows of a process that nobody was beside."""
    folder = tmp_path_factory.mktemp("alone") / "study"
    shutil.copytree(study_folder, folder, ignore=shutil.ignore_patterns("sft"))
    run_sft(folder, config, seeds=[100])
    return rows_of(folder)


@pytest.fixture(scope="module")
def tuned_row(alone):
    return next(row for row in alone if row["method"] == "hml")


def _run_in_a_process(folder, config, ran):
    torch.set_num_threads(1)
    ran.put(run_sft(folder, config, seeds=[100]).ran)


def test_two_processes_fine_tune_each_model_once_with_the_same_rows(alone, copied, config):
    context = multiprocessing.get_context("spawn")
    ran = context.Queue()
    pair = [context.Process(target=_run_in_a_process, args=(copied, config, ran)) for _ in range(2)]
    for process in pair:
        process.start()
    counts = [ran.get(timeout=180) for _ in pair]
    for process in pair:
        process.join(timeout=60)
    assert sum(counts) == 4
    lines = (copied / "sft" / "words" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert lasting(rows_of(copied)) == lasting(alone)
    assert not [*copied.glob(".workers/*"), *copied.glob(".claims/*")]
    assert not list(copied.glob("sft/words/*/checkpoint-*"))


def test_a_model_of_another_process_is_waited_for_and_not_run(copied, config, quick, monkeypatch):
    run_sft(copied, config, **ONE)
    results = copied / "sft" / "words" / "results.jsonl"
    (row,) = map(json.loads, results.read_text().splitlines())
    results.write_text("")
    claims = copied / ".claims"
    claims.mkdir()
    lock = FileLock(claims / f"sft-words-{row['key']}", thread_local=False)
    lock.acquire()
    said, waits = [], threading.Event()

    def say(sentence):
        said.append(sentence)
        if "waiting" in sentence:
            waits.set()

    def end():
        waits.wait(30)
        add_result(results.parent, row)
        lock.release()

    worker = threading.Thread(target=end)
    worker.start()
    monkeypatch.setattr(sft_module, "train", lambda *_, **__: pytest.fail("it ran again"))
    progress = run_sft(copied, config, say=say, **ONE)
    worker.join()
    assert (progress.ran, progress.left, progress.is_out_of_time) == (0, 0, False)
    assert said.count("waiting for models that other processes fine-tune") == 1


def test_what_another_process_left_unfinished_is_taken_over(tuned_row, copied, config, quick):
    stopped = run_sft(copied, config, deadline=Deadline(4, Ticks()), **ONE)
    assert stopped.is_out_of_time
    (checkpoint,) = copied.glob("sft/words/hml-100-*/checkpoint-*")
    claims = copied / ".claims"
    claims.mkdir()
    lock = FileLock(claims / f"sft-words-{tuned_row['key']}", thread_local=False)
    lock.acquire()
    said = []

    def say(sentence):
        said.append(sentence)
        if "waiting" in sentence:
            lock.release()  # as a kill does

    assert run_sft(copied, config, say=say, **ONE).ran == 1
    assert any("resuming from" in line and line.endswith(checkpoint.name) for line in said)
    assert lasting(rows_of(copied)) == lasting([tuned_row])


def test_two_names_do_not_wait_for_each_other(copied, config, tuned_row):
    claims = copied / ".claims"
    claims.mkdir()
    with FileLock(claims / f"sft-another-{tuned_row['key']}"):
        assert run_sft(copied, config, **ONE).ran == 1


def test_what_was_begun_before_an_option_was_there_keeps_its_rows(copied, config):
    run_sft(copied, config, **ONE)
    facts = copied / "sft" / "words" / "sft.json"
    values = json.loads(facts.read_text())
    del values["options"]["key_start"]
    facts.write_text(json.dumps(values))
    old = Sft("words", values["options"], values["rows"])
    study, identity = read_study_folder(copied)
    finalists = find_finalists(copied, study, identity)
    results = facts.parent / "results.jsonl"
    row = json.loads(results.read_text())
    (key,) = (old.key(f) for f in finalists if (f.method, f.seed) == ("hml", 100))
    assert key != row["key"]
    results.write_text(json.dumps({**row, "key": key}) + "\n")
    again = run_sft(copied, config, only=["hml"])  # the other seed is left
    assert (again.ran, again.left) == (1, 0)
    report = make_sft_report(copied, "words")
    assert [len(line.rows) for line in report.lines if line.label == "hml"] == [2]


def test_memory_that_others_had_is_asked_for_again(copied, config, monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(sft_module, "train", no_memory)
        (alone,) = run_sft(copied, config, **ONE).skipped
        with at_work(copied):
            (shared,) = run_sft(copied, config, **ONE).skipped
    assert "lower trainer.per_device_train_batch_size" in alone
    assert "beside the other processes on its device" in shared
    assert run_sft(copied, config, **ONE).ran == 1


class TightTasks(FakeTasks):
    """Memory holds the first, and no batch of the second while others are there."""

    has_room = False

    def measure(self, model, options, results, say, is_past):
        results.setdefault("one", 0.5)
        results.setdefault("two", 0.25 if self.has_room else None)
        return True

    def without_memory(self, results):
        return [name for name, value in results.items() if value is None]


def test_tasks_that_others_left_no_memory_for_run_again(copied, config, monkeypatch):
    plain = sft_module.read_study_folder

    def with_tasks(folder):
        study, identity = plain(folder)
        return replace(study, tasks=object()), identity

    monkeypatch.setattr(sft_module, "read_study_folder", with_tasks)
    monkeypatch.setattr(sft_module, "Tasks", TightTasks)
    with at_work(copied):
        (why,) = run_sft(copied, config, **ONE).skipped
    assert "beside the other processes on its device" in why
    assert not rows_of(copied)
    monkeypatch.setattr(TightTasks, "has_room", True)
    monkeypatch.setattr(
        sft_module.SftCallback, "on_step_begin", lambda *_, **__: pytest.fail("a step")
    )
    assert run_sft(copied, config, **ONE).ran == 1
    (row,) = rows_of(copied)
    assert {name: task["acc"] for name, task in row["tasks"].items()} == {"one": 0.5, "two": 0.25}


def test_a_speed_is_of_a_device_that_nobody_shared(copied, config, other):
    run_sft(copied, config, **ONE)
    (row,) = rows_of(copied)
    assert row["seconds"] is None
    assert row["tokens_per_second"] is None
    line = next(
        text for text in to_markdown(make_sft_report(copied, "words")).splitlines() if "hml" in text
    )
    assert line.rstrip(" |").endswith("-")


def test_a_run_alone_has_its_speed(copied, config):
    run_sft(copied, config, **ONE)
    (row,) = rows_of(copied)
    assert row["seconds"] > 0
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])


def test_who_has_come_and_gone_is_in_the_checkpoint(copied, config, monkeypatch):
    shared = iter([False, *[True] * 10])  # at the first checkpoint another was there
    monkeypatch.setattr(SftCallback, "__init__", _with(SftCallback.__init__, lambda: next(shared)))
    run_sft(copied, config, settings=["trainer.save_steps=2"], **ONE)
    (row,) = rows_of(copied)
    assert row["seconds"] is None


def _with(init, has_been_alone):
    return lambda self, deadline, _: init(self, deadline, has_been_alone)


def test_what_others_have_begun_is_not_begun_otherwise(copied, config, other):
    run_sft(copied, config, **ONE)
    (copied / "sft" / "words" / "results.jsonl").unlink()  # they have not come to a row yet
    with pytest.raises(MidusError, match=r"was begun with optimizer.lr=0.001 and not 0.01"):
        run_sft(copied, config, settings=["optimizer.lr=0.01"], **ONE)

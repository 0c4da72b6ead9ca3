"""Several processes on one fine-tuning: each model once, the same rows, no shared speeds."""

import json
import multiprocessing
import threading

import pytest
import torch
from filelock import FileLock
from small_sft import rows_of

from midus.errors import MidusError
from midus.studies import sft as sft_module
from midus.studies.presence import device_name
from midus.studies.results import add_result
from midus.studies.sft import run_sft
from midus.studies.sft_report import make_sft_report, to_markdown
from midus.studies.sft_run import SftCallback

CHANGING = ("seconds", "tokens_per_second", "conditions", "options")
ONE = {"only": ["hml"], "seeds": [100]}


def lasting(rows):
    """By key, without what is of the moment and the place."""
    return {row["key"]: {k: v for k, v in row.items() if k not in CHANGING} for row in rows}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(sft_module, "_WAIT", 0.01)


@pytest.fixture
def other(copied):
    """Another process at work in the folder, as its locks show it."""
    (copied / ".workers").mkdir(exist_ok=True)
    with FileLock(copied / ".workers" / f"0@{device_name(torch.device('cpu'))}"):
        yield


def _run_in_a_process(folder, config, ran):
    torch.set_num_threads(1)
    ran.put(run_sft(folder, config, seeds=[100]).ran)


def test_two_processes_fine_tune_each_model_once_with_the_same_rows(study_folder, copied, config):
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
    run_sft(study_folder, config, seeds=[100])
    alone = lasting(rows_of(study_folder))
    together = lasting(rows_of(copied))
    assert together == {key: alone[key] for key in together}
    assert not [*copied.glob(".workers/*"), *copied.glob(".claims/*")]
    assert not list(copied.glob("sft/words/*/checkpoint-*"))


def test_a_model_of_another_process_is_waited_for_and_not_run(copied, config, quick, monkeypatch):
    run_sft(copied, config, **ONE)
    results = copied / "sft" / "words" / "results.jsonl"
    (row,) = map(json.loads, results.read_text().splitlines())
    results.write_text("")
    claims = copied / ".claims"
    claims.mkdir()
    lock = FileLock(claims / f"sft-{row['key']}", thread_local=False)
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


def test_what_another_process_left_unfinished_is_taken_over(copied, config, quick):
    run_sft(copied, config, settings=["trainer.max_steps=1"], name="other", **ONE)
    claims = copied / ".claims"
    claims.mkdir()
    (key,) = (row["key"] for row in rows_of(copied, "other"))
    lock = FileLock(claims / f"sft-{key}", thread_local=False)
    lock.acquire()
    (copied / "sft" / "other" / "results.jsonl").write_text("")

    def say(sentence):
        if "waiting" in sentence:
            lock.release()  # as a kill does

    settings = ["trainer.max_steps=1"]
    assert run_sft(copied, config, settings=settings, name="other", say=say, **ONE).ran == 1
    assert len(rows_of(copied, "other")) == 1


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

"""Several processes on one study: each trial once, whole rows, and no speed that was shared."""

import json
import multiprocessing
import os
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from small import HML, Ticks, make_study, rows_of

from midus.errors import MidusError
from midus.studies import folder as folder_module
from midus.studies import run as run_module
from midus.studies import trial as trial_module
from midus.studies.folder import joined, opened
from midus.studies.grid import search_trials
from midus.studies.loop import Loop
from midus.studies.material import Material
from midus.studies.presence import device_name
from midus.studies.results import add_result, read_results
from midus.studies.run import run_study
from midus.studies.timing import Deadline
from midus.studies.unfinished import drop_unfinished
from midus.studies.workers import Worker, others_at_work

CPU = torch.device("cpu")


def by_key(rows):
    return {row["key"]: row for row in rows}


@pytest.fixture
def other(tmp_path):
    """Another process at work in the folder, as its locks show it."""
    (tmp_path / ".workers").mkdir()
    with FileLock(tmp_path / ".workers" / f"0@{device_name(CPU)}"):
        yield


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run_module, "_WAIT", 0.01)


def _run_in_a_process(study, out, ran):
    torch.set_num_threads(1)
    ran.put(run_study(study, out).ran)


def test_two_processes_run_each_trial_once_with_the_same_rows(finished, tmp_path):
    study, out, _ = finished
    context = multiprocessing.get_context("spawn")
    ran = context.Queue()
    pair = [
        context.Process(target=_run_in_a_process, args=(study, tmp_path, ran)) for _ in range(2)
    ]
    for process in pair:
        process.start()
    counts = [ran.get(timeout=120) for _ in pair]
    for process in pair:
        process.join(timeout=60)
    assert sum(counts) == 4
    lines = rows_of(tmp_path)
    assert len(lines) == 5
    assert by_key(lines) == by_key(rows_of(out))
    assert not [*tmp_path.glob(".workers/*"), *tmp_path.glob(".claims/*")]


def test_a_trial_of_another_process_is_waited_for_and_not_run(finished, tmp_path, quick):
    study, out, _ = finished
    *rows, last = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    for row in rows:
        add_result(tmp_path, row)
    said, waits = [], threading.Event()
    claims = tmp_path / ".claims"
    claims.mkdir()
    lock = FileLock(claims / last["key"], thread_local=False)
    lock.acquire()

    def say(sentence):
        said.append(sentence)
        if "waiting" in sentence:
            waits.set()

    def end():
        waits.wait(30)
        time.sleep(0.1)  # it looks several times
        add_result(tmp_path, last)
        lock.release()

    worker = threading.Thread(target=end)
    worker.start()
    progress = run_study(study, tmp_path, say=say)
    worker.join()
    assert (progress.ran, progress.left) == (0, 0)
    assert sum("waiting for trials" in sentence for sentence in said) == 1


def test_a_trial_that_ended_just_before_its_claim_is_not_run_again(finished, tmp_path, monkeypatch):
    study, out, _ = finished
    rows, claimed = read_results(out), Worker.claimed

    @contextmanager
    def ended(self, key):
        with claimed(self, key) as is_ours:
            add_result(tmp_path, rows[key])
            yield is_ours

    monkeypatch.setattr(Worker, "claimed", ended)
    assert run_study(study, tmp_path).ran == 0
    assert read_results(tmp_path) == rows


def test_lines_are_written_one_after_the_other(finished, tmp_path):
    row = next(iter(read_results(finished[1]).values()))
    writer = threading.Thread(target=add_result, args=(tmp_path, row))
    with FileLock(tmp_path / ".writing"):
        writer.start()
        writer.join(timeout=0.2)
        assert not (tmp_path / "results.jsonl").exists()
    writer.join()
    assert read_results(tmp_path) == {row["key"]: row}


def test_a_trial_whose_process_was_killed_is_run_by_the_one_that_waits(finished, tmp_path, quick):
    study, out, _ = finished
    last = by_key(rows_of(out))[search_trials(study)[-1].key(_identity(study))]
    claims = tmp_path / ".claims"
    claims.mkdir()
    lock = FileLock(claims / last["key"])
    lock.acquire()

    def say(sentence):
        if "waiting" in sentence:
            lock.release()  # as the system does for a process that is gone

    assert run_study(study, tmp_path, say=say).ran == 4
    assert by_key(rows_of(tmp_path)) == by_key(rows_of(out))


def test_time_that_is_up_ends_the_waiting(finished, tmp_path, quick):
    study, _, _ = finished
    claims = tmp_path / ".claims"
    claims.mkdir()
    keys = [trial.key(_identity(study)) for trial in search_trials(study)]
    locks = [FileLock(claims / key) for key in keys]
    for lock in locks:
        lock.acquire()
    progress = run_study(study, tmp_path, deadline=Deadline(0.5))
    assert (progress.ran, progress.left, progress.is_out_of_time) == (0, 4, True)


def test_a_trial_beside_another_has_no_speed(finished, tmp_path, other):
    study, out, _ = finished
    run_study(study, tmp_path, only=["full"])
    rows = [row for row in read_results(tmp_path).values() if row["method"] == "full"]
    assert [row["tokens_per_second"] for row in rows] == [None, None]
    alone = [row for row in read_results(out).values() if row["method"] == "full"]
    assert all(row["tokens_per_second"] > 0 for row in alone)


def test_one_that_began_beside_another_has_none_when_it_goes_on_alone(material, tmp_path):
    study = make_study(material, methods={"hml": {"set": HML}}, search={})
    (tmp_path / ".workers").mkdir()
    with FileLock(tmp_path / ".workers" / f"0@{device_name(CPU)}"):
        assert run_study(study, tmp_path, deadline=Deadline(0.0)).is_out_of_time
        ticks = iter(range(100))
        run_study(study, tmp_path, deadline=Deadline(6, lambda: next(ticks)))
        assert list(tmp_path.glob("unfinished/*/facts.json"))
    run_study(study, tmp_path)
    (row,) = [row for row in read_results(tmp_path).values() if row["method"] == "hml"]
    assert (row["status"], row["tokens_per_second"]) == ("done", None)


def test_one_that_goes_on_on_another_device_has_no_speed(material, tmp_path, monkeypatch):
    study = make_study(material, methods={"full": {}}, search={})
    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "hardware", lambda: "1 x another")
        assert run_study(study, tmp_path, deadline=Deadline(6, Ticks())).is_out_of_time
    run_study(study, tmp_path)
    _, row = read_results(tmp_path).values()
    assert (row["status"], row["tokens_per_second"]) == ("done", None)


def test_one_that_came_and_went_in_between_is_noticed(material, tmp_path, monkeypatch):
    study = make_study(material, methods={"full": {}}, search={}, curve_points=1)
    trained, visitor = Loop.step, Worker(tmp_path, CPU)

    def step(self, *args):
        trained(self, *args)
        if self.done == 2:
            visitor.enter()
        elif self.done == 5:
            visitor.leave()

    monkeypatch.setattr(Loop, "step", step)
    run_study(study, tmp_path)
    _, row = read_results(tmp_path).values()
    assert (row["status"], row["tokens_per_second"]) == ("done", None)


def test_memory_that_others_hold_is_no_result(material, tmp_path, other, monkeypatch):
    study = make_study(material, methods={"full": {}, "hml": {"set": HML}}, search={})
    trained = Loop.step

    def step(self, *args):
        if self.options.upscale is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        trained(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", step)
        with pytest.raises(MidusError, match=r"1 could not; .*beside the other processes"):
            run_study(study, tmp_path)
    assert [row["method"] for row in rows_of(tmp_path)] == ["untouched", "hml"]
    assert run_study(study, tmp_path).ran == 1


def test_what_another_process_ran_in_the_end_is_no_failure(finished, tmp_path, other, monkeypatch):
    study, out, _ = finished
    full = [row for row in read_results(out).values() if row["method"] == "full"]
    trained = Loop.step

    def step(self, *args):
        if self.options.upscale is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        trained(self, *args)

    def say(sentence):
        if sentence.startswith("4 of 4"):
            for row in full:
                add_result(tmp_path, row)

    monkeypatch.setattr(Loop, "step", step)
    progress = run_study(study, tmp_path, say=say)
    assert (progress.ran, progress.left) == (2, 0)


def test_the_base_is_read_by_the_one_that_is_left(finished, tmp_path):
    study, out, _ = finished
    base, _, *rows = read_results(out).values()
    for row in rows:
        add_result(tmp_path, row)
    (tmp_path / ".claims").mkdir()
    lock = FileLock(tmp_path / ".claims" / base["key"])
    lock.acquire()

    def say(sentence):
        if sentence.startswith("1 of 4"):
            lock.release()  # as the system does for a process that is gone

    run_study(study, tmp_path, say=say)
    assert [row["method"] for row in rows_of(tmp_path)[-2:]] == ["full", "untouched"]


def test_a_model_that_another_process_grows_keeps_nobody_waiting(
    material, tmp_path, monkeypatch, quick
):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    lesa = {"upscale": {"method": "lesa", "lesa_epochs": 1}}
    study = make_study(material, methods={"lesa": {"set": lesa}, "full": {}}, search={})
    shared = Material(material["base"], material["tokens"], {})
    first, second = search_trials(study)
    folder, _ = shared._grown(first.options.upscale)
    folder.parent.mkdir(parents=True)
    said = []
    with FileLock(f"{folder}.lock") as growing:
        assert shared.is_being_grown(first.options)
        assert not shared.is_being_grown(second.options)

        def say(sentence):
            said.append(sentence)
            if "waiting" in sentence:
                growing.release()

        run_study(study, tmp_path / "out", say=say)
    assert [row["method"] for row in rows_of(tmp_path / "out")] == ["untouched", "full", "lesa"]
    assert any("waiting" in sentence for sentence in said)
    assert not shared.is_being_grown(first.options)


def test_another_device_is_not_shared(tmp_path):
    worker = Worker(tmp_path, CPU)
    worker.enter()
    assert worker.is_alone()
    with FileLock(tmp_path / ".workers" / "0@elsewhere-cuda"):
        assert worker.is_alone()
        assert others_at_work(tmp_path)
    worker.leave()
    assert not others_at_work(tmp_path)


def test_processes_of_the_same_number_are_two(tmp_path):
    """As in containers that share the host's name."""
    first, second = Worker(tmp_path, CPU), Worker(tmp_path, CPU)
    first.enter()
    second.enter()
    assert (first.is_alone(), second.is_alone()) == (False, False)
    first.leave()
    assert second.is_alone()
    second.leave()
    assert not others_at_work(tmp_path)


def test_a_gpu_is_the_same_in_containers_of_other_names(tmp_path, monkeypatch):
    gpu = SimpleNamespace(uuid="one-two")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    workers = []
    for host in ("one", "another"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        workers.append(Worker(tmp_path, torch.device("cuda")))
        workers[-1].enter()
    assert [worker.is_alone() for worker in workers] == [False, False]
    for worker in workers:
        worker.leave()


def test_a_folder_that_is_busy_at_the_end_changes_no_result(material, tmp_path, monkeypatch):
    study = make_study(material, methods={"full": {}}, search={})
    monkeypatch.setattr(folder_module, "_PATIENCE", 0.1)
    lock = FileLock(tmp_path / ".lock")

    def say(sentence):
        if sentence.startswith("  perplexity"):
            lock.acquire()

    progress = run_study(study, tmp_path, say=say)
    assert (progress.ran, progress.left) == (1, 0)
    assert not others_at_work(tmp_path)
    lock.release()


def test_a_file_system_without_locks_is_said(material, tmp_path, monkeypatch):
    def acquire(*_, **__):
        raise NotImplementedError("FileSystem does not appear to support flock")  # filelock < 3.24

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(MidusError, match=r"cannot be used \(FileSystem does not appear"):
        run_study(make_study(material), tmp_path)


def test_what_needs_the_folder_alone_waits_for_no_worker(material, tmp_path, other):
    study = make_study(material)
    shared = Material(material["base"], material["tokens"], {})
    with (
        pytest.raises(MidusError, match="in use by another midus study command"),
        opened(tmp_path, shared),
    ):
        pass
    with joined(tmp_path, study, shared) as worker:
        assert not worker.is_alone()


def test_a_worker_that_fails_leaves_the_folder_free(material, tmp_path, monkeypatch):
    study = make_study(material, methods={"full": {}}, search={})

    def fail(*_):
        raise RuntimeError("no step")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", fail)
        with pytest.raises(RuntimeError, match="no step"):
            run_study(study, tmp_path)
    assert not others_at_work(tmp_path)
    assert run_study(study, tmp_path).ran == 1


def test_a_state_is_saved_while_others_take_the_empty_folder_away(material, tmp_path, monkeypatch):
    study = make_study(material, methods={"full": {}}, search={})
    made, removed = os.mkdir, []

    def mkdir(path, *args):
        made(path, *args)
        if Path(path).name == "unfinished" and not removed:
            removed.append(path)
            drop_unfinished(tmp_path, "another")

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert run_study(study, tmp_path, deadline=Deadline(4, Ticks())).is_out_of_time
    assert removed
    assert list(tmp_path.glob("unfinished/*/facts.json"))


def _identity(study):
    options = search_trials(study)[0].options
    return Material(options.model, options.data.sources[0].path, study.texts).identity

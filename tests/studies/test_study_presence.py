"""Studies in different folders on one device: each sees the others, and no speed was shared."""

import multiprocessing
import shutil
import time

import pytest
import torch
from filelock import FileLock
from small import make_study

from midus.errors import MidusError
from midus.studies import sft as sft_module
from midus.studies.folder import joined
from midus.studies.loop import Loop
from midus.studies.material import Material
from midus.studies.presence import Presence, device_name
from midus.studies.results import read_results
from midus.studies.run import run_study
from midus.studies.sft import run_sft
from midus.studies.timed_apart import time_trials
from midus.studies.workers import UNSEEN, Worker

CPU = torch.device("cpu")
ONE = {"methods": {"full": {}}, "search": {}, "curve_points": 1}
DEVICE = "here-cuda"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MIDUS_CACHE", str(folder))
    return folder


@pytest.fixture
def elsewhere(tmp_path):
    """A worker of a study in another folder, outside."""
    worker = Worker(tmp_path / "elsewhere", CPU)
    yield worker
    worker.leave()


@pytest.fixture
def unusable(cache):
    """A cache that nobody can write into, not even root."""
    cache.write_text("a file")


def speed_of(out):
    _, row = read_results(out).values()
    assert row["status"] == "done"
    return row["tokens_per_second"]


def _work(out, told):
    worker = Worker(out, CPU)
    worker.enter()
    told.send("there")
    time.sleep(600)


def test_a_process_of_another_study_is_seen_until_it_is_killed(material, tmp_path):
    context = multiprocessing.get_context("spawn")
    heard, told = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(tmp_path / "elsewhere", told))
    process.start()
    try:
        assert heard.poll(120)
        run_study(make_study(material, **ONE), tmp_path / "beside")
    finally:
        process.kill()
        process.join()
    run_study(make_study(material, **ONE), tmp_path / "alone")
    assert speed_of(tmp_path / "beside") is None
    assert speed_of(tmp_path / "alone") > 0


def test_another_study_that_came_and_went_in_between_is_noticed(
    material, tmp_path, elsewhere, monkeypatch
):
    trained = Loop.step

    def step(self, *args):
        trained(self, *args)
        if self.done == 2:
            elsewhere.enter()
        elif self.done == 5:
            elsewhere.leave()

    monkeypatch.setattr(Loop, "step", step)
    run_study(make_study(material, **ONE), tmp_path / "out")
    assert speed_of(tmp_path / "out") is None


def test_a_study_that_came_and_went_before_does_not_count(material, tmp_path, elsewhere):
    elsewhere.enter()
    elsewhere.leave()
    run_study(make_study(material, **ONE), tmp_path / "out")
    assert speed_of(tmp_path / "out") > 0


def test_memory_that_another_study_holds_is_no_result(material, tmp_path, elsewhere, monkeypatch):
    def step(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    elsewhere.enter()
    monkeypatch.setattr(Loop, "step", step)
    with pytest.raises(MidusError, match="beside the other processes on its device"):
        run_study(make_study(material, **ONE), tmp_path / "out")


def test_machines_that_share_a_study_and_no_cache_see_each_other(tmp_path, monkeypatch):
    workers = []
    for name in ("one", "another"):
        monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / name))
        workers.append(Worker(tmp_path / "out", CPU))
        workers[-1].enter()
    assert [worker.solitude() for worker in workers] == [None, None]
    workers[0].leave()
    assert workers[1].solitude() is not None
    workers[1].leave()


def test_a_cache_that_cannot_be_written_stops_no_study(material, tmp_path, unusable, elsewhere):
    said = []
    elsewhere.enter()
    run_study(make_study(material, **ONE), tmp_path / "out", say=said.append)
    assert said[0] == UNSEEN
    assert speed_of(tmp_path / "out") > 0


def test_without_a_cache_the_same_study_is_still_seen(tmp_path, unusable):
    first, second = Worker(tmp_path / "out", CPU), Worker(tmp_path / "out", CPU)
    assert first.enter()
    assert first.solitude() is not None
    assert second.enter()
    assert (first.solitude(), second.solitude()) == (None, None)
    assert not first.sees_other_studies
    for worker in (first, second):
        worker.leave()


def test_a_cache_that_is_gone_meanwhile_tells_of_nobody_and_fails_nothing(tmp_path, cache):
    worker = Worker(tmp_path / "out", CPU)
    worker.enter()
    shutil.rmtree(cache)
    assert worker.solitude() is None
    worker.leave()


def test_what_killed_processes_left_is_taken_away_by_the_next(tmp_path):
    """Their locks, and the visits of devices that are free."""
    killed = [f"{number}@{device}" for number in range(3) for device in (DEVICE, "gone-cpu")]
    for name in (*killed, f"visits-{DEVICE}", "visits-gone-cpu"):
        (tmp_path / name).write_bytes(b".....")
    presence = Presence(tmp_path, DEVICE)
    presence.enter()
    assert presence.visits() == 1
    presence.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".door", f"visits-{DEVICE}"]


def test_what_others_hold_stays_whoever_comes(tmp_path):
    (tmp_path / "0@other-cuda").write_bytes(b"")
    (tmp_path / "visits-other-cuda").write_bytes(b"...")
    first, second = Presence(tmp_path, DEVICE), Presence(tmp_path, DEVICE)
    with FileLock(tmp_path / "0@other-cuda"):
        first.enter()
        second.enter()
        second.leave()
        Presence(tmp_path, "third-cuda").enter()
        assert first.visits() == 2
        assert (tmp_path / "visits-other-cuda").read_bytes() == b"..."
        assert (tmp_path / "0@other-cuda").is_file()
    first.leave()


def test_one_that_wants_to_be_alone_stays_outside_unseen(tmp_path):
    first, second = Presence(tmp_path, DEVICE), Presence(tmp_path, DEVICE)
    assert first.enter(only_alone=True)
    assert not second.enter(only_alone=True)
    assert first.is_alone()
    assert first.visits() == 1
    first.leave()
    assert second.enter(only_alone=True)
    second.leave()


@pytest.fixture
def untimed(material, tmp_path, elsewhere):
    """A study whose one trial has no speed."""
    elsewhere.enter()
    run_study(make_study(material, **ONE), tmp_path / "out")
    elsewhere.leave()
    return tmp_path / "out"


def test_speeds_are_not_timed_beside_another_study(midus, untimed, elsewhere):
    elsewhere.enter()
    before = elsewhere.solitude()
    told = midus("study", "time", untimed)
    assert told.code == 2
    sentence = "another midus study command works on this device, which would change the speeds"
    assert f"{sentence}; wait for it, or take another" in told.err.replace("\n", " ")
    assert speed_of(untimed) is None
    assert elsewhere.solitude() == before  # it has been disturbed by nothing
    elsewhere.leave()
    assert midus("study", "time", untimed, "--steps", 1).code == 0
    assert speed_of(untimed) > 0


def test_a_timing_that_another_study_came_to_does_not_count(untimed, elsewhere, monkeypatch):
    trained = Loop.step

    def step(self, *args):
        trained(self, *args)
        if self.done == 1:
            elsewhere.enter()
            elsewhere.leave()

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", step)
        timed = time_trials(untimed, steps=1)
    assert (timed.trials, timed.timings) == (0, 0)
    assert "another study has come to the device" in timed.skipped[0]
    assert speed_of(untimed) is None
    assert time_trials(untimed, steps=1).trials == 1


def test_without_a_cache_speeds_are_timed_and_it_is_said(untimed, cache):
    shutil.rmtree(cache)
    cache.write_text("a file")
    said = []
    time_trials(untimed, steps=1, say=said.append)
    assert said[0] == UNSEEN
    assert speed_of(untimed) > 0


def test_one_that_times_is_seen(untimed, elsewhere, monkeypatch):
    seen, trained = [], Loop.step

    def step(self, *args):
        trained(self, *args)
        seen.append(not elsewhere.is_alone())

    monkeypatch.setattr(Loop, "step", step)
    time_trials(untimed, steps=1)
    assert set(seen) == {True}
    assert elsewhere.is_alone()
    assert not [*untimed.glob(".workers")]


def test_one_that_fine_tunes_is_seen(copied, config, elsewhere, monkeypatch):
    seen, trained = [], sft_module.train

    def train(*args, **kwargs):
        seen.append(not elsewhere.is_alone())
        return trained(*args, **kwargs)

    monkeypatch.setattr(sft_module, "train", train)
    settings = ["trainer.max_steps=1"]
    assert run_sft(copied, config, settings=settings, only=["hml"], seeds=[100]).ran == 1
    assert seen == [True]
    assert elsewhere.is_alone()


def test_a_worker_is_seen_by_others_on_its_device_alone(material, tmp_path, cache):
    shared = Material(material["base"], material["tokens"], {})
    with joined(tmp_path / "out", make_study(material), shared):
        assert not Presence(cache / "devices", device_name(CPU)).is_alone()
        assert Presence(cache / "devices", "other-cuda").is_alone()
    assert Presence(cache / "devices", device_name(CPU)).is_alone()

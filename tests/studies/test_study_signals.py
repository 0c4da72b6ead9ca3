"""A signal ends a study at the next step; the same command goes on to the same bits."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml
from small import make_study, rows_of

from midus.studies import stopping
from midus.studies.run import run_study
from midus.studies.stopping import ended_by_signals
from midus.studies.timing import Deadline

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def handlers():
    """Tests raise signals in this process: whatever fails, its handlers come back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@BOTH
def test_the_first_signal_ends_the_deadline_and_the_second_does_what_it_did(
    number, capfd, monkeypatch
):
    monkeypatch.setattr(stopping, "_TWICE", 0.0)
    reached = []
    signal.signal(number, lambda *_: reached.append("before"))
    deadline = Deadline(None)
    with ended_by_signals(deadline):
        assert not deadline.is_past()
        os.kill(os.getpid(), number)
        assert deadline.is_past()
        assert deadline.reason == "as told"
        assert reached == []
        os.kill(os.getpid(), number)
    assert reached == ["before"]
    assert capfd.readouterr().err.count("stopping at the next step") == 1


def test_a_signal_that_comes_twice_at_once_counts_once():
    reached = []
    signal.signal(signal.SIGTERM, lambda *_: reached.append("before"))
    deadline = Deadline(None)
    with ended_by_signals(deadline):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert deadline.is_past()
    assert reached == []


def test_nobody_need_read_what_is_said():
    deadline = Deadline(None)
    kept = os.dup(2)
    reads, writes = os.pipe()
    try:
        os.dup2(writes, 2)
        os.close(reads)
        with ended_by_signals(deadline):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.dup2(kept, 2)
        os.close(writes)
        os.close(kept)
    assert deadline.is_past()


def test_handlers_come_back(handlers):
    with ended_by_signals(Deadline(None)):
        assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_a_signal_that_was_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deadline = Deadline(None)
    with ended_by_signals(deadline):
        os.kill(os.getpid(), signal.SIGINT)
        assert not deadline.is_past()


def test_another_thread_can_run_a_study(handlers):
    def use():
        with ended_by_signals(Deadline(None)):
            seen.append(signal.getsignal(signal.SIGTERM))

    seen = []
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [handlers[signal.SIGTERM]]


def test_a_study_stopped_by_a_signal_ends_with_the_same_bits(finished, tmp_path):
    study, out, _ = finished
    deadline = Deadline(None)

    def say(sentence):
        if "tokens:" in sentence and not deadline.was_told:  # in the middle of the first trial
            os.kill(os.getpid(), signal.SIGTERM)

    with ended_by_signals(deadline):
        stopped = run_study(study, tmp_path, say=say, deadline=deadline)
    assert stopped.is_out_of_time
    assert stopped.ran == 0
    assert len(list(tmp_path.glob("unfinished/*/facts.json"))) == 1
    assert not run_study(study, tmp_path).is_out_of_time
    assert rows_of(tmp_path) == rows_of(out)


def test_the_command_stops_and_says_so(material, tmp_path):
    study = make_study(material, methods={"full": {}}, search={})
    run = dict(study.run)
    run["data"] = {**run["data"], "max_tokens": 64 * 20_000}  # more than a minute
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        yaml.safe_dump({"name": "long", "run": run, "methods": {"full": {}}, "curve_points": 12})
    )
    command = [
        sys.executable,
        "-m",
        "midus",
        "study",
        "run",
        str(grid),
        "--out",
        str(tmp_path / "o"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if "tokens:" in line:
                process.send_signal(signal.SIGTERM)
                break
        began = time.monotonic()
        said, warned = process.communicate(timeout=120)
    assert process.returncode == 0, warned
    assert "stopped    as told, 1 or more are left; the same command goes on" in said
    assert "stopping at the next step" in warned
    assert list((tmp_path / "o").glob("unfinished/*/facts.json"))
    assert time.monotonic() - began < 60

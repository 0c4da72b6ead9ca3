"""A process a model: messages arrive, deaths are told, nothing is left behind."""

import os
import signal
import threading
from dataclasses import replace

import pytest

from midus.efficiency import runs
from midus.efficiency.processes import run_in_process
from midus.efficiency.protocol import make_protocol
from midus.efficiency.rows import Job, Point, empty_row
from midus.efficiency.subjects import parse_subjects


def send_twice(argument, send):
    send("first", argument)
    send("second", os.getpid())


def send_and_die(argument, send):
    send("rows", argument)
    os.kill(os.getpid(), signal.SIGKILL)


def send_and_fail(argument, send):
    send("pid", os.getpid())
    os._exit(3)


def send_and_wait(argument, send):
    send("pid", os.getpid())
    threading.Event().wait()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_messages_arrive_in_order_from_another_process():
    messages = []
    assert run_in_process(send_twice, {"a": 1}, lambda *m: messages.append(m)) is None
    assert messages[0] == ("first", {"a": 1})
    assert messages[1][0] == "second"
    assert messages[1][1] != os.getpid()


def test_a_death_is_a_sentence():
    assert "SIGKILL" in run_in_process(send_and_die, 1, lambda *m: None)
    assert "code 3" in run_in_process(send_and_fail, 1, lambda *m: None)


def test_interrupting_the_parent_ends_the_process():
    pids = []

    def receive(kind, pid):
        pids.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(send_and_wait, None, receive)
    assert pids
    assert not is_alive(pids[0])


def jobs(*methods):
    protocol = make_protocol("cpu")
    return [
        Job(target="tiny", is_shape=True, points=(Point(subject=s, protocol=protocol, labels={}),))
        for s in parse_subjects(",".join(methods))
    ]


def test_a_run_goes_on_after_a_process_died(monkeypatch):
    def run(function, job, receive):
        subject = job.points[0].subject
        if subject.method == "llama_pro":
            return "the process was ended by SIGKILL"  # before it said anything
        receive("hardware", "a machine")
        receive("rows", [{**empty_row(job.points[0]), "train_gb": 1.0}])
        return "the process ended with code 1" if subject.method == "opt_deus" else None

    monkeypatch.setattr(runs, "run_in_process", run)
    kept = []
    rows, hardware = runs.run_jobs(
        jobs("base", "llama_pro", "opt_deus", "midus:hml"), lambda rows, _: kept.append(len(rows))
    )
    assert hardware == "a machine"
    assert [row["method"] for row in rows] == ["base", "llama_pro", "opt_deus", "midus"]
    assert [row["errors"] for row in rows] == [
        {},
        {"process": "the process was ended by SIGKILL"},
        {"process": "the process ended with code 1"},
        {},
    ]
    assert rows[1]["train_gb"] is None
    assert rows[2]["train_gb"] == 1.0  # what it had measured before
    assert kept[-1] == 4


def test_points_a_dead_process_did_not_come_to_are_rows_too(monkeypatch):
    (job,) = jobs("base")
    point = job.points[0]
    job = replace(job, points=tuple(replace(point, labels={"value": v}) for v in (1, 2, 3)))

    def run(function, job, receive):
        receive("rows", [empty_row(job.points[0]), empty_row(job.points[1])])
        return "the process ended with code 1"

    monkeypatch.setattr(runs, "run_in_process", run)
    rows, _ = runs.run_jobs([job], lambda *_: None)
    assert [row["value"] for row in rows] == [1, 2, 3]
    assert [row["errors"].get("process") for row in rows] == [
        None, "the process ended with code 1", "the process ended before this row",
    ]  # fmt: skip


def test_a_real_death_leaves_the_rows_it_had_sent(monkeypatch):
    (job,) = jobs("base")
    row = {**empty_row(job.points[0]), "params_total": 7}
    monkeypatch.setattr(runs, "run_job", send_and_die)
    real = runs.run_in_process
    monkeypatch.setattr(runs, "run_in_process", lambda f, _, receive: real(f, [row], receive))
    (kept,), _ = runs.run_jobs([job], lambda *_: None)
    assert kept["params_total"] == 7
    assert "SIGKILL" in kept["errors"]["process"]

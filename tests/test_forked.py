"""The tests' own way to start programs tells a good end from a bad one."""

import signal
import time

import pytest
from forked import Forks, Replies


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("forks"), "json")
    yield forks
    forks.close()


def test_a_good_program_ends_well_with_its_arguments(forks, tmp_path):
    forks.run("import sys; open(sys.argv[1], 'w').write(sys.argv[2])", tmp_path / "out", 3)
    assert (tmp_path / "out").read_text() == "3"


def test_each_program_has_its_own_modules(forks):
    forks.run("import json; json.mark = 1; import colorsys")
    forks.run(
        "import json, sys; assert not hasattr(json, 'mark') and 'colorsys' not in sys.modules"
    )


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("raise ValueError('what broke')", 1, "what broke"),
        ("import sys; sys.exit(2)", 2, ""),
        ("import sys; sys.exit('a sentence')", 1, ""),
        ("def", 1, "SyntaxError"),
        ("import os; os.kill(os.getpid(), 11)", -11, ""),
    ],
)
def test_a_bad_end_is_seen(forks, program, status, said):
    running = forks.start(program)
    assert running.wait() == status
    assert said in running.stderr
    with pytest.raises(AssertionError):
        forks.run(program)


def test_a_program_that_ended_before_it_was_asked_for_has_ended(forks, monkeypatch):
    plain = Replies._read

    def late(self):
        time.sleep(1)  # so that a first read finds both of its lines
        plain(self)

    monkeypatch.setattr(Replies, "_read", late)
    running = forks.start("import sys; sys.exit(3)")
    assert running.poll() == 3


def test_one_that_was_left_running_is_ended_for_the_next(forks):
    left = forks.start("import time; time.sleep(60)")
    running = forks.start("import sys; sys.exit(4)")
    assert (left.returncode, running.wait()) == (-signal.SIGKILL, 4)
    assert running.pid not in (0, left.pid)


def test_a_killed_program_is_gone(forks):
    running = forks.start("import time; time.sleep(60)")
    assert running.poll() is None
    begun = time.monotonic()
    running.kill()
    assert running.wait() == running.poll() == -signal.SIGKILL
    assert time.monotonic() - begun < 30

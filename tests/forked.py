"""Python programs that start at once: forked from a process that has imported what takes long.

A fresh interpreter imports torch and transformers for five to seven seconds; here one process does
it for many programs, one after the other. It computes nothing itself, so that forks are sound.
"""

import json
import os
import select
import signal
import subprocess
import sys

SERVER = """
import importlib, json, os, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(sys.modules), flush=True)
for line in sys.stdin:
    program, arguments, errors = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv, status = ["-c", *arguments], 1
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
"""


class Replies:
    """Lines of a pipe, none of them hidden in a buffer from who asks whether there is one."""

    def __init__(self, pipe) -> None:
        self._pipe, self._held = pipe.fileno(), b""

    def has_line(self) -> bool:
        while b"\n" not in self._held and select.select([self._pipe], [], [], 0)[0]:
            self._read()
        return b"\n" in self._held

    def line(self) -> str:
        while b"\n" not in self._held:
            self._read()
        line, _, self._held = self._held.partition(b"\n")
        return line.decode()

    def _read(self) -> None:
        part = os.read(self._pipe, 65536)
        if not part:
            raise EOFError("the process that forks has ended")
        self._held += part


class Program:
    """A running program, in the words of `subprocess.Popen`."""

    def __init__(self, replies, errors) -> None:
        self._replies, self._errors = replies, errors
        self.pid = int(replies.line())
        self.returncode = None

    def poll(self):
        if self.returncode is None and self._replies.has_line():
            self.wait()
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = int(self._replies.line())
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def stderr(self) -> str:
        return self._errors.read_text()


class Forks:
    """Starts programs, one at a time, in forks of a process that has imported ``preload``."""

    def __init__(self, folder, *preload, env=None) -> None:
        self._errors = folder / "stderr"
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        self._replies, self._running = Replies(self._server.stdout), None
        self.imported = set(self._replies.line().split())  # EOFError: one cannot be imported

    def start(self, program, *arguments) -> Program:
        if self._running is not None:  # of a test that failed before it had ended
            self._running.kill()
            self._running.wait()
        asked = json.dumps([program, list(map(str, arguments)), str(self._errors)])
        self._server.stdin.write(asked.encode() + b"\n")
        self._server.stdin.flush()
        self._running = Program(self._replies, self._errors)
        return self._running

    def run(self, program, *arguments) -> None:
        """Runs a program to its end, which must be a good one."""
        running = self.start(program, *arguments)
        assert running.wait() == 0, running.stderr

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

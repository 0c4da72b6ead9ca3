"""A server in a process of its own: started, waited for, spoken to, ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openai import APIError, OpenAI

PORT = "PORT"
START_SECONDS = 900  # compiling takes minutes on a small machine


@contextmanager
def running(command: list[str], log: Path) -> Iterator[OpenAI]:
    """An OpenAI client of a server that lives as long as the context.

    Args:
        command: The server's command, with `PORT` where a port belongs.
        log: Where its output goes.
    """
    port = free_port()
    with log.open("w") as output:
        server = subprocess.Popen(
            [part.replace(PORT, str(port)) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ},
            start_new_session=True,
        )
        try:
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
            wait(client, server, log)
            yield client
        finally:
            end(server)


def wait(client: OpenAI, server: subprocess.Popen[bytes], log: Path) -> None:
    started = time.monotonic()
    while server.poll() is None and time.monotonic() - started < START_SECONDS:
        try:
            client.models.list()
            return
        except APIError:
            time.sleep(1)
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    sys.exit(f"{''.join(lines[-40:])}\nthe server did not start; all of its output: {log}")


def end(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and the processes it started, which share its session."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(timeout=60)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

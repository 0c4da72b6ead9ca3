"""Fixtures of the whole suite; the tiny models are made in `tiny.py`."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Of processes that tests start: two threads each would wait for each other beside other tests.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import sys
from dataclasses import dataclass

import pytest
import torch

# Before anything imports Triton.
import triton_on_cpu  # noqa: F401


def pytest_collection_modifyitems(items):
    # Files with slow tests first, so that no process ends long after the others.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True, scope="module")
def _what_is_here_stays():
    # All that is imported; collecting garbage, which every training run does, need not read it.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_thread():
    # Tests run side by side; one thread each also keeps sums in one order.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    # Dynamo counts recompilations of one function over all tests of a process, and gives up at 8.
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@dataclass
class Result:
    """What a user of the command sees."""

    code: int
    out: str
    err: str


@pytest.fixture
def midus(monkeypatch, capsys):
    """Runs the `midus` command in this process."""
    from midus.cli.main import main

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["midus", *map(str, args)])
        capsys.readouterr()  # what came before the command is not its output
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run

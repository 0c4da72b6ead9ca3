"""The conditions that measurements carry."""

import sys
from types import SimpleNamespace

import pytest

from midus.reports import conditions


@pytest.mark.parametrize(
    ("called", "module", "typed"),
    [
        ("/somewhere/bin/midus", "midus.cli.main", "midus"),
        ("/src/midus/__main__.py", "midus.__main__", "python -m midus"),
        ("/src/midus/a/b/__main__.py", "midus.a.b.__main__", "python -m midus.a.b"),
    ],
)
def test_the_command_says_what_was_called(called, module, typed, monkeypatch):
    monkeypatch.setattr(sys, "argv", [called, "bench", "decode"])
    main = SimpleNamespace(__spec__=SimpleNamespace(name=module))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert conditions()["command"] == f"{typed} bench decode"

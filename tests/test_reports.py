"""The conditions that measurements carry."""

import sys

import pytest

from midus.reports import conditions


@pytest.mark.parametrize(
    ("called", "typed"),
    [("/somewhere/bin/midus", "midus"), ("/src/midus/__main__.py", "python -m midus")],
)
def test_the_command_stands_as_it_would_be_typed_again(called, typed, monkeypatch):
    monkeypatch.setattr(sys, "argv", [called, "bench", "decode"])
    assert conditions()["command"] == f"{typed} bench decode"

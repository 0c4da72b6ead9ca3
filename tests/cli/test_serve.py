"""`midus serve`: what it starts, and what it says where it cannot."""

import importlib.util
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from tiny import save_base

from midus.serving import server


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.fixture
def base(tmp_path):
    save_base(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def delta(midus, base, tmp_path):
    assert midus("upscale", base, tmp_path / "delta", "--delta", "--num-subkeys", 8).code == 0
    return tmp_path / "delta"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Commands and environments that took the process's place; with a vLLM that is but files."""
    module = tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.touch()
    origin = tmp_path / "site" / "vllm" / "__init__.py"
    find = importlib.util.find_spec

    def find_spec(name, *args):
        if name == "vllm":
            return ModuleSpec("vllm", None, origin=str(origin), is_package=True)
        return find(name, *args)

    calls = []
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(server, "entry_points", lambda **_: ["midus"])
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    return calls


def test_a_full_model_is_served_from_its_folder(midus, base, started):
    result = midus("serve", base)
    assert result.code == 0, result.err
    [(program, command, environment)] = started
    assert program == sys.executable
    assert command == [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base),
        "--served-model-name", str(base), "--host", "127.0.0.1", "--port", "8000",
    ]  # fmt: skip
    assert environment == dict(os.environ)
    assert result.out == f"serving    {base} at http://127.0.0.1:8000/v1\n"


def test_options_reach_vllm_and_those_after_the_dashes_come_last(midus, base, started):
    result = midus(
        "serve", base, "--host", "0.0.0.0", "--port", 9000, "--name", "mine",
        "--", "--dtype", "float32", "--enforce-eager", "--port", "9001",
    )  # fmt: skip
    assert result.code == 0, result.err
    [(_, command, _)] = started
    assert command[5:] == [
        "--served-model-name", "mine", "--host", "0.0.0.0", "--port", "9000",
        "--dtype", "float32", "--enforce-eager", "--port", "9001",
    ]  # fmt: skip


def test_a_delta_is_merged_on_first_use_and_the_lines_say_so(midus, delta, started):
    first, second = midus("serve", delta), midus("serve", delta)
    assert first.code == second.code == 0, first.err + second.err
    pattern = r"merged     (\S+) \((.*)\)\nserving    "
    lines = [re.match(pattern, result.out) for result in (first, second)]
    assert [line[2] for line in lines] == ["made once, to be used again", "made earlier"]
    folders = {line[1] for line in lines}
    assert folders == {command[4] for _, command, _ in started}
    assert len(folders) == 1
    assert (Path(*folders) / "model.safetensors.index.json").is_file()
    # Clients call it by the name its user knows.
    assert started[0][1][6] == str(delta)


def test_a_vllm_without_the_old_module_is_started_by_its_command_line(base, tmp_path):
    command = server.server_command(tmp_path, base, "name", "localhost", 80)
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(base)]
    assert "--model" not in command


def test_where_plugins_are_chosen_by_name_ours_is_added():
    environment = server.server_environment({"VLLM_PLUGINS": "other", "A": "b"})
    assert environment == {"VLLM_PLUGINS": "other,midus", "A": "b"}
    assert server.server_environment({"VLLM_PLUGINS": "midus"}) == {"VLLM_PLUGINS": "midus"}
    assert server.server_environment({"VLLM_PLUGINS": ""}) == {"VLLM_PLUGINS": "midus"}
    assert server.server_environment({}) == {}


def refused(result):
    assert result.code == 2, result.out
    assert result.err.startswith("midus: ")
    assert result.err.count("\n") == 1
    return result.err


def test_without_vllm_one_sentence_says_what_to_install(midus, base, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("something was started"))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "vllm" else find(name)
    )
    assert "run: pip install vllm" in refused(midus("serve", base))


def test_a_folder_called_vllm_is_no_vllm(midus, base, started, monkeypatch):
    spec = ModuleSpec("vllm", None, origin=None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: spec)
    assert "run: pip install vllm" in refused(midus("serve", base))


def test_memory_blocks_without_the_plugin_are_refused(midus, delta, base, started, monkeypatch):
    monkeypatch.setattr(server, "entry_points", lambda **_: [])
    assert "vLLM does not find its plugin" in refused(midus("serve", delta))
    assert midus("serve", base).code == 0  # a plain model needs none
    assert len(started) == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["BASE", "other"], "'other' is one argument too many"),
        (["BASE", "--base", "BASE"], "is no delta; leave it out"),
        (["nowhere/at/all"], "does not exist"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused(midus, base, started, arguments, part):
    arguments = [str(base) if argument == "BASE" else argument for argument in arguments]
    assert part in refused(midus("serve", *arguments))
    assert not started


def test_a_wrong_base_is_refused(midus, delta, tmp_path, started):
    save_base(tmp_path / "other", seed=5)
    error = refused(midus("serve", delta, "--base", tmp_path / "other"))
    assert "is not the base of this model" in error
    assert not started

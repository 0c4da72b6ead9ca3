"""vLLM's plugin, with a stand-in for vLLM: `make test-vllm` runs the real one."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from midus.models import CAUSAL_LM_CLASSES
from midus.serving.plugin import MODEL, register

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def registered(monkeypatch):
    """What the plugin tells vLLM, by class name."""
    models = {}
    vllm = ModuleType("vllm")
    vllm.ModelRegistry = type("ModelRegistry", (), {"register_model": models.__setitem__})
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    register()
    return models


def test_the_entry_point_is_the_plugin():
    groups = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    module, name = groups["vllm.general_plugins"]["midus"].split(":")
    assert getattr(import_module(module), name) is register


def test_every_familys_class_is_registered_by_name(registered):
    names = [f"Midus{prefix}ForCausalLM" for prefix in
             ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Olmo2")]  # fmt: skip
    assert set(names) == {cls.__name__ for cls in CAUSAL_LM_CLASSES.values()}
    # A string: vLLM imports the class where it makes a model.
    assert registered == dict.fromkeys(names, MODEL)


def test_the_class_vllm_is_sent_to_is_in_the_file_it_is_sent_to():
    module, name = MODEL.split(":")
    source = Path(__file__).parents[2] / "src" / f"{module.replace('.', '/')}.py"
    assert f"class {name}(TransformersForCausalLM)" in source.read_text()

"""What vLLM's backend is handed, with a stand-in for vLLM: `make test-vllm` runs the real one."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny import MEMORY, every_bypass, every_family, grown, prompt_ids, save_base
from torch import nn

from midus import MemoryConfig, UpscaleConfig
from midus.models.block import MemoryBlock
from midus.models.configuration import read_config
from midus.upscaling import upscale_checkpoint


class Backend:
    """What is used of vLLM's own: a model that parts are replaced in, a loader of tensors."""

    def __init__(self, model=None, config=None):
        self.model, self.config = model, config

    def recursive_replace(self):
        self.classes = [type(block.self_attn) for block in self.model.layers]

    def load_weights(self, weights):
        self.loaded = dict(weights)
        return set(self.loaded)


@pytest.fixture
def make(monkeypatch):
    """Makes our class over the stand-in, in a group of so many ranks."""

    def made(num_ranks=1):
        modules = {
            "vllm": {},
            "vllm.distributed": {
                "get_tensor_model_parallel_world_size": lambda: num_ranks,
                "tensor_model_parallel_all_gather": lambda x: torch.cat([x] * num_ranks, -1),
            },
            "vllm.model_executor": {},
            "vllm.model_executor.models": {},
            "vllm.model_executor.models.transformers": {"TransformersForCausalLM": Backend},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content, __path__=[])
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "midus.serving.vllm_model", raising=False)
        return importlib.import_module("midus.serving.vllm_model").MidusTransformersForCausalLM

    yield made
    sys.modules.pop("midus.serving.vllm_model", None)


@every_family
@every_bypass
def test_attentions_of_memory_blocks_are_a_class_of_their_own(make, family, bypass):
    memory = MemoryConfig(num_subkeys=8, top_k=4, bypass=bypass)
    model = grown(family, memory=memory).model
    with torch.no_grad():
        before = model(prompt_ids()).last_hidden_state
    served = make()(model)
    served.recursive_replace()
    own = model.layers[0].self_attn.__class__
    for block, attention_class in zip(model.layers, served.classes, strict=True):
        is_memory = isinstance(block, MemoryBlock)
        assert (attention_class is own) != is_memory
        assert issubclass(attention_class, own)
        assert "o_proj" in dict(block.self_attn.named_children())
    assert len(set(served.classes)) == 2  # one class a kind, so that vLLM analyses each once
    with torch.no_grad():
        assert torch.equal(model(prompt_ids()).last_hidden_state, before)


def test_a_kept_output_projection_is_left_to_vllm(make):
    model = grown(memory=MemoryConfig(num_subkeys=8, top_k=4, attn_output_proj=True)).model
    served = make()(model)
    served.recursive_replace()
    assert len(set(served.classes)) == 1
    assert all(isinstance(block.self_attn.o_proj, nn.Linear) for block in model.layers)


def test_heads_that_are_shared_out_come_together_before_the_memory(make):
    model = grown().model
    make(num_ranks=2)(model).recursive_replace()
    block = model.layers[model.config.memory_positions[0]]
    half = torch.arange(6.0).view(1, 2, 3)  # [B, T, heads of one rank]
    assert torch.equal(block.self_attn.o_proj(half), torch.cat([half, half], -1))


@pytest.mark.parametrize("is_delta", [True, False])
def test_a_delta_is_loaded_with_its_base(make, tmp_path, is_delta):
    save_base(tmp_path / "base")
    config = UpscaleConfig(memory=MEMORY)
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", config, delta=True)
    delta = load_file(tmp_path / "delta" / "delta.safetensors")
    settings = read_config(tmp_path / "delta") if is_delta else SimpleNamespace(is_delta=False)
    served = make()(config=settings)
    names = served.load_weights(delta.items())
    assert ("model.embed_tokens.weight" in names) == is_delta
    assert names >= delta.keys()

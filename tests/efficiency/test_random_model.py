"""Random models on the device are the models that loading would give, but for their weights."""

import pytest
import torch

from midus import UpscaleConfig
from midus.config import MemoryConfig
from midus.efficiency.random_model import make_random_model
from midus.efficiency.subjects import PAPER_METHODS, parse_subjects
from midus.memory.base import MemoryLayer
from midus.models.fitting import causal_lm_class
from midus.models.record import set_trainable
from midus.models.shapes import shape_config
from midus.upscaling.inspect import describe

CPU = torch.device("cpu")
SUBJECTS = parse_subjects(PAPER_METHODS + ",midus:hml@top_heavy,solar")


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.label)
def test_random_models_run_and_count_as_inspect_says(subject):
    base = shape_config("tiny")
    config = subject.grown_config(base)
    model = make_random_model(config, CPU, torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(10).unsqueeze(0)).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
    memory = MemoryConfig(kind=subject.memory) if subject.memory else MemoryConfig()
    options = UpscaleConfig(method=subject.method, placement=subject.placement, memory=memory)
    expected = describe(base, options)["params"]
    set_trainable(model)
    sizes = {p: p.numel() for p in model.parameters()}
    assert sum(sizes.values()) == expected["total"]
    assert sum(n for p, n in sizes.items() if p.requires_grad) == expected["trainable"]
    if subject.method == "base":
        assert expected["trainable"] == expected["total"]


@pytest.mark.parametrize("text", ["base", "midus:hml", "midus:ultramem"])
def test_buffers_are_those_of_a_model_built_plainly(text):
    (subject,) = parse_subjects(text)
    config = subject.grown_config(shape_config("tiny"))
    plain = dict(causal_lm_class(config)(config).named_buffers())
    made = dict(make_random_model(config, CPU, torch.bfloat16).named_buffers())
    assert plain.keys() == made.keys()
    assert "model.rotary_emb.inv_freq" in made
    for name, buffer in plain.items():
        assert torch.equal(buffer, made[name]), name
        assert buffer.dtype == made[name].dtype, name


def test_weights_have_the_type_asked_for_and_stay_tied():
    (subject,) = parse_subjects("midus:hml")
    model = make_random_model(
        subject.grown_config(shape_config("tiny")), CPU, torch.bfloat16, longest=4096
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.max_position_embeddings >= 4096
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


@pytest.mark.parametrize("kind", ["hml", "linear", "pkm", "ultramem"])
def test_no_table_is_silent(kind):
    (subject,) = parse_subjects(f"midus:{kind}")
    model = make_random_model(subject.grown_config(shape_config("tiny")), CPU, torch.float32)
    layers = [m for m in model.modules() if isinstance(m, MemoryLayer)]
    assert len(layers) == 2
    with torch.no_grad():
        for layer in layers:
            assert all(table.any() for table in layer.keys_and_values())
            width = layer.num_heads * layer.query_dim
            assert layer(torch.randn(1, 3, width)).abs().max() > 0

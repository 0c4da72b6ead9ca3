import pytest

from midus import MemoryConfig, UpscaleConfig
from midus.memory import MEMORY_LAYERS
from midus.models.shapes import SHAPES, shape_config
from midus.upscaling.inspect import describe

# Parameters of the published checkpoints.
PUBLISHED = {
    "tiny": 164_416,
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "olmo-2-1b": 1_484_916_736,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name):
    assert describe(shape_config(name))["params"]["base"] == PUBLISHED[name]


def test_llama_8b_counts_are_the_papers():
    facts = describe(shape_config("llama-3.1-8b"))
    assert facts["params"]["trainable"] == 423_690_240
    assert facts["params"]["total"] == 8_453_951_488
    assert facts["slots"] == 2_097_152
    assert facts["positions"] == list(range(1, 48, 3))


def test_llama_1b_counts_are_the_papers():
    facts = describe(shape_config("llama-3.2-1b"))
    assert facts["params"]["trainable"] == 54_542_336
    assert facts["params"]["total"] == 1_290_356_736
    assert facts["slots"] == 1_048_576


MEMORIES = {
    "llama-3.1-8b": {
        "linear": (1_476_460_544, 9_506_721_792),
        "pkm": (1_212_219_392, 9_242_480_640),
        "ultramem": (1_291_915_264, 9_322_176_512),
        "hml": (423_690_240, 8_453_951_488),
    },
    "llama-3.2-1b": {
        "linear": (251_674_624, 1_487_489_024),
        "pkm": (185_614_336, 1_421_428_736),
        "ultramem": (171_984_896, 1_407_799_296),
        "hml": (54_542_336, 1_290_356_736),
    },
}


@pytest.mark.parametrize("shape", MEMORIES)
@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_memory_layers_have_the_parameters_behind_the_papers_table(shape, kind):
    config = UpscaleConfig(memory=MemoryConfig(kind=kind))
    params = describe(shape_config(shape), config)["params"]
    assert (params["trainable"], params["total"]) == MEMORIES[shape][kind]


@pytest.mark.parametrize(("num_subkeys", "slots"), [(16, 65_536), (32, 262_144), (64, 1_048_576)])
def test_slots_of_the_papers_ablation(num_subkeys, slots):
    config = UpscaleConfig(memory=MemoryConfig(num_subkeys=num_subkeys))
    assert describe(shape_config("llama-3.2-1b"), config)["slots"] == slots


@pytest.mark.parametrize("latent_dim", [None, 32])
def test_trainable_parameters_follow_the_papers_formula(latent_dim):
    config = UpscaleConfig(memory=MemoryConfig(num_subkeys=32, latent_dim=latent_dim))
    base = shape_config("llama-3.2-1b")
    d, heads, kv, head_dim, n = 2048, 32, 8, 64, 32
    rank = latent_dim or head_dim
    attention = d * (heads + 2 * kv) * head_dim + d  # q, k, v and the norm
    block = attention + heads * 2 * n * (head_dim // 2) + n * n * rank + heads * rank * head_dim
    assert describe(base, config)["params"]["trainable"] == 8 * block


def test_options_add_the_parameters_they_name():
    base = shape_config("llama-3.2-1b")

    def trainable(**options):
        memory = MemoryConfig(**options)
        return describe(base, UpscaleConfig(memory=memory))["params"]["trainable"]

    plain = trainable()
    assert trainable(attn_output_proj=True) - plain == 8 * 2048 * 2048
    assert trainable(memory_output_proj=True) - plain == 8 * 2048 * 2048
    assert trainable(bypass="attention") - plain == 8 * 2048 * 2048
    assert trainable(bypass="stream") - plain == 8 * 2048 * 2048
    assert trainable(query_norm="layer") - plain == 8 * 2 * 64
    assert trainable(query_norm="batch") - plain == 8 * 2 * 2048
    assert trainable(attention_residual=True) == plain


@pytest.mark.parametrize("kind", MEMORY_LAYERS)
def test_a_bypass_has_the_width_of_what_it_reads(kind):
    """Qwen3-0.6B: 16 heads of 128 on a stream of 1,024; other layers project them to it first."""

    def trainable(bypass):
        memory = MemoryConfig(kind=kind, bypass=bypass)
        facts = describe(shape_config("qwen3-0.6b"), UpscaleConfig(memory=memory))
        return facts["params"]["trainable"]

    attended = 16 * 128 if kind == "hml" else 1024
    plain = trainable("none")
    assert trainable("attention") - plain == 14 * 1024 * attended
    assert trainable("stream") - plain == 14 * 1024 * 1024

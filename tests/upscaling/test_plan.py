import pytest
from tiny import tiny_config

from midus import MemoryConfig, MidusError, UpscaleConfig
from midus.upscaling.inspect import describe, plan_of
from midus.upscaling.methods import plan_upscaling, remarks
from midus.upscaling.plan import StackPlan


def test_memory_blocks_stand_before_their_anchors():
    assert str(StackPlan.interleave(4, [1, 3], "before", "memory")) == (
        "  0  base   0\n  1  memory 1\n  2  base   1\n  3  base   2\n  4  memory 3\n  5  base   3"
    )


def test_copies_stand_after_their_anchors():
    assert str(StackPlan.interleave(4, [1, 3], "after", "copy")) == (
        "  0  base   0\n  1  base   1\n  2  copy   1\n  3  base   2\n  4  base   3\n  5  copy   3"
    )


def test_half_of_the_blocks_by_default_and_one_for_a_single_block():
    plan, _ = plan_upscaling(tiny_config(), UpscaleConfig(), {})
    assert plan.anchors == [1, 3]
    plan, _ = plan_upscaling(tiny_config(num_hidden_layers=1), UpscaleConfig(), {})
    assert plan.anchors == [0]


def test_a_saved_config_leads_back_to_its_plan():
    config = UpscaleConfig(positions=(0, 1, 5))
    plan, new_config = plan_upscaling(tiny_config(), config, {})
    assert plan_of(new_config) == plan
    assert describe(new_config) == describe(tiny_config(), config)


def test_layer_types_follow_the_anchors():
    base = tiny_config("gemma2")
    plan, new_config = plan_upscaling(base, UpscaleConfig(num_inserted=3), {})
    assert new_config.layer_types == [base.layer_types[i] for i in plan.sources]
    assert set(base.layer_types) == {"sliding_attention", "full_attention"}


def test_unknown_method_and_family_list_the_known_ones():
    with pytest.raises(MidusError, match="method='midas' is unknown; choose one of midus"):
        plan_upscaling(tiny_config(), UpscaleConfig(method="midas"), {})
    other = tiny_config()
    other.__class__.model_type, saved = "phi3", other.model_type
    try:
        with pytest.raises(MidusError, match="'phi3' is not supported; known families: llama"):
            plan_upscaling(other, UpscaleConfig(), {})
    finally:
        other.__class__.model_type = saved


def test_top_1_is_remarked_upon():
    assert "keys and q/k/v" in remarks(MemoryConfig(top_k=1))[0]
    assert remarks(MemoryConfig()) == []

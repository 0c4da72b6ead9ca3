"""Copied-block methods: plans, start weights by their formulas, identity where promised."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import every_family, load, prompt_ids, save_base, tiny_base, tiny_config
from transformers import AutoModelForCausalLM

from midus import (
    MemoryConfig,
    MidusError,
    UpscaleConfig,
    load_model,
    save_delta,
    set_trainable,
    upscale,
    upscale_checkpoint,
)
from midus.models.shapes import shape_config
from midus.upscaling import METHODS, lesa, merge_delta, opt_deus
from midus.upscaling.inspect import describe
from midus.upscaling.methods import plan_upscaling

COPIES = [name for name, method in METHODS.items() if method.inserts == "copy"]


def quick(method):
    """The method with settings that make a test short."""
    fast = {"lesa": {"lesa_epochs": 1}, "opt_deus": {"ot_max_iter": 200}}
    return UpscaleConfig(method=method, **fast.get(method, {}))


def sources(method, depth, **options):
    config = UpscaleConfig(method=method, **options)
    return METHODS[method].make_plan(config, depth).sources


def block(model, layer):
    return model.model.layers[layer].state_dict()


# Plans.


@pytest.mark.parametrize(
    ("depth", "inserted", "ranges"),
    [
        (16, 8, [(0, 12), (4, 16)]),
        (32, 16, [(0, 24), (8, 32)]),
        (30, 15, [(0, 23), (8, 30)]),
        (4, 4, [(0, 4), (0, 4)]),
    ],
)
def test_solar_ranges(depth, inserted, ranges):
    expected = [i for start, stop in ranges for i in range(start, stop)]
    assert sources("solar", depth, num_inserted=inserted) == expected


def test_stack_and_gradual_stack():
    assert sources("stack", 2, num_inserted=5) == [0, 1, 0, 1, 0, 1, 0]
    assert sources("stack", 4, num_inserted=3) == [0, 1, 2, 3, 0, 1, 2]
    assert sources("gradual_stack", 16) == [*range(16), *range(8, 16)]
    assert sources("gradual_stack", 32) == [*range(32), *range(16, 32)]


def test_llama_pro_stands_after_its_anchors_and_the_others_before():
    for depth, inserted, step in ((16, 8, 3), (32, 16, 3)):
        plan = METHODS["llama_pro"].make_plan(UpscaleConfig(method="llama_pro"), depth)
        assert plan.positions == list(range(2, depth + inserted, step))
        for method in ("opt_deus", "avg_deus", "lesa"):
            plan = METHODS[method].make_plan(UpscaleConfig(method=method), depth)
            assert plan.positions == list(range(depth // 2, depth + inserted, 2))
            assert plan.anchors == list(range(depth // 2, depth))


def test_other_placements_where_they_are_defined():
    assert sources("llama_pro", 4, placement="top_heavy") == [0, 1, 2, 2, 3, 3]
    assert sources("llama_pro", 4, positions=(2, 5)) == [0, 1, 1, 2, 3, 3]
    assert sources("avg_deus", 4, placement="distributed") == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("method", ["avg_deus", "opt_deus", "lesa"])
@pytest.mark.parametrize(
    "options", [{"num_inserted": 4}, {"positions": (0,)}, {"placement": "bottom_heavy"}]
)
def test_a_left_neighbour_is_needed(method, options):
    with pytest.raises(MidusError, match="insert at most 3 blocks and none at position 0"):
        sources(method, 4, **options)


@pytest.mark.parametrize("method", ["solar", "stack", "gradual_stack"])
def test_ranges_take_no_placement(method):
    with pytest.raises(MidusError, match="takes no placement"):
        sources(method, 4, placement="top_heavy")


@pytest.mark.parametrize("method", ["solar", "gradual_stack"])
def test_ranges_that_overlap_use_a_block_at_most_twice(method):
    with pytest.raises(MidusError, match="num_inserted=5 is out of range"):
        sources(method, 4, num_inserted=5)


def test_base_inserts_nothing():
    assert sources("base", 4) == [0, 1, 2, 3]
    with pytest.raises(MidusError, match="inserts nothing"):
        sources("base", 4, num_inserted=2)


# Parameters, to the digit.

COUNTS = {
    "llama-3.1-8b": {
        "base": (8_030_261_248, 8_030_261_248),
        **dict.fromkeys(
            ["llama_pro", "opt_deus", "lesa", "avg_deus"], (3_489_792_000, 11_520_053_248)
        ),
        **dict.fromkeys(["solar", "stack", "gradual_stack"], (11_520_053_248, 11_520_053_248)),
        "midus": (423_690_240, 8_453_951_488),
    },
    "llama-3.2-1b": {
        "base": (1_235_814_400, 1_235_814_400),
        **dict.fromkeys(
            ["llama_pro", "opt_deus", "lesa", "avg_deus"], (486_572_032, 1_722_386_432)
        ),
        **dict.fromkeys(["solar", "stack", "gradual_stack"], (1_722_386_432, 1_722_386_432)),
        "midus": (54_542_336, 1_290_356_736),
    },
}


@pytest.mark.parametrize("shape", COUNTS)
@pytest.mark.parametrize("method", METHODS)
def test_parameters(shape, method):
    facts = describe(shape_config(shape), UpscaleConfig(method=method))
    assert (facts["params"]["trainable"], facts["params"]["total"]) == COUNTS[shape][method]


# Start weights, by their formulas.


def test_stacked_blocks_are_the_bases():
    base = tiny_base()
    for method in ("solar", "stack", "gradual_stack"):
        grown = upscale(base, UpscaleConfig(method=method))
        for position, source in enumerate(sources(method, 4)):
            mine, theirs = block(grown, position), block(base, source)
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@every_family
def test_llama_pro_copies_all_but_its_silent_outputs(family):
    overrides = {"attention_bias": True} if family in ("llama", "olmo2") else {}
    base = tiny_base(family, **overrides)
    torch.manual_seed(1)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    grown = upscale(base, UpscaleConfig(method="llama_pro"))
    copied, anchor = block(grown, 2), block(base, 1)
    for name, tensor in copied.items():
        silent = name.startswith(("self_attn.o_proj", "mlp.down_proj"))
        assert torch.equal(tensor, torch.zeros_like(tensor) if silent else anchor[name]), name
    assert torch.equal(grown(prompt_ids()).logits, base(prompt_ids()).logits)


@every_family
def test_avg_deus_is_the_mean_of_the_neighbours(family):
    base = tiny_base(family)
    torch.manual_seed(1)
    for parameter in base.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1  # norms too
    grown = upscale(base, UpscaleConfig(method="avg_deus"))
    for position, anchor in ((2, 2), (4, 3)):
        mine, left, right = block(grown, position), block(base, anchor - 1), block(base, anchor)
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, (left[name] + right[name]) / 2)


def dense_plan(first, second, reg, iterations=4000):
    """Sinkhorn by hand, in float64: exp(-M / reg) scaled until both marginals are uniform."""
    cost = torch.cdist(first.double(), second.double())
    kernel = torch.exp(-(cost - cost.min()) / reg)
    rows, columns = cost.shape
    v = torch.ones(columns, dtype=torch.float64)
    for _ in range(iterations):
        u = (1 / rows) / (kernel @ v)
        v = (1 / columns) / (kernel.T @ u)
    return (u[:, None] * kernel * v[None, :]).float()


@pytest.mark.parametrize("rescale", [False, True])
def test_opt_deus_against_a_dense_computation(rescale):
    """The fusion as published, and with plans multiplied by their number of rows."""
    base = tiny_base(num_key_value_heads=4)
    torch.manual_seed(2)
    for name, parameter in base.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    reg = 0.5  # large enough that the plain kernel does not underflow
    options = UpscaleConfig(method="opt_deus", ot_reg=reg, ot_rescale=rescale, ot_tolerance=1e-12)
    grown = upscale(base, options)
    a, b = block(base, 1), block(base, 2)

    def plan(first, second):
        return dense_plan(first, second, reg) * (len(second) if rescale else 1)

    output = plan(a["self_attn.o_proj.weight"], b["self_attn.o_proj.weight"])
    expected = {
        "input_layernorm.weight": (a["input_layernorm.weight"] + b["input_layernorm.weight"]) / 2
    }
    for matrix in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        name = f"{matrix}.weight"
        expected[name] = (plan(a[name], b[name]).T @ a[name] + b[name]) / 2
    for matrix in ("mlp.gate_proj", "mlp.up_proj"):
        name = f"{matrix}.weight"
        aligned = a[name] @ output
        expected[name] = (plan(aligned, b[name]).T @ aligned + b[name]) / 2
    norm = "post_attention_layernorm.weight"
    expected[norm] = (a[norm] @ (0.5 * output + 0.5 * torch.eye(32)) + b[norm]) / 2
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        expected[name] = torch.zeros_like(b[name])
    mine = block(grown, 2)
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5)
    if not rescale:  # the published code's plan has mass 1, so the left block hardly counts
        half = b["self_attn.q_proj.weight"] / 2
        assert (mine["self_attn.q_proj.weight"] - half).norm() < 0.1 * half.norm()


def test_transport_plans_have_uniform_marginals_even_where_a_plain_kernel_underflows():
    torch.manual_seed(0)
    first, second = 0.1 * torch.randn(12, 6), 0.1 * torch.randn(12, 6)
    second[:, 0] += 100
    assert not torch.exp(-torch.cdist(first, second).double() / 0.06).any()
    plan = opt_deus.transport(first, second, UpscaleConfig(ot_reg=0.06))
    torch.testing.assert_close(plan.sum(0), torch.full((12,), 1 / 12), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(plan.sum(1), torch.full((12,), 1 / 12), rtol=1e-4, atol=1e-6)
    normed = opt_deus.transport(first, second, UpscaleConfig(ot_normalize_cost=True))
    assert not torch.allclose(plan, normed)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_lesa_factors_rebuild_every_matrix(shape):
    torch.manual_seed(0)
    weights = [torch.randn(shape) for _ in range(5)]
    left, rows = lesa.decompose(weights)
    for weight, row in zip(weights, rows, strict=True):
        torch.testing.assert_close(left @ row, weight, rtol=1e-4, atol=1e-5)
    # The columns of U diag(S) are orthogonal, largest first, as in a singular value decomposition.
    together = torch.linalg.svdvals(torch.cat(weights, dim=1))
    torch.testing.assert_close(left.norm(dim=0), together[: left.shape[1]], rtol=1e-4, atol=1e-4)


def test_lesa_factors_of_matrices_that_span_less():
    torch.manual_seed(0)
    basis = torch.randn(8, 3)
    weights = [basis @ torch.randn(3, 5) for _ in range(4)]
    left, rows = lesa.decompose(weights)
    assert left.shape == (8, 3)
    for weight, row in zip(weights, rows, strict=True):
        torch.testing.assert_close(left @ row, weight, rtol=1e-4, atol=1e-4)


def test_lesa_predictor_has_the_published_shape_and_learns():
    predictor = lesa.make_predictor(7)
    shapes = [tuple(p.shape) for p in predictor.parameters()]
    assert shapes == [(256, 14), (256,), (256, 256), (256,), (7, 256), (7,)]
    torch.manual_seed(0)
    rows = [torch.randn(64, 7)]
    for _ in range(6):
        rows.append(rows[-1] + 0.1)
    inputs, targets = torch.cat([rows[1], rows[3]], dim=1), rows[2]
    errors = []
    for epochs in (1, 30):
        with torch.no_grad():
            predicted = lesa.train_predictor(rows, seed=0, epochs=epochs)(inputs)
        errors.append((predicted - targets).square().mean().item())
    assert errors[1] < errors[0] / 4


def test_lesa_blocks():
    """Matrices predicted between the neighbours, everything else from base block 0."""
    base = tiny_base()
    torch.manual_seed(2)
    for name, parameter in base.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn_like(parameter)
    options = UpscaleConfig(method="lesa", lesa_epochs=2, seed=3)
    grown = upscale(base, options)
    assert METHODS["lesa"].make_plan(options, 4).anchors == [2, 3]  # gaps 1-2 and 2-3
    for position, anchor in ((2, 2), (4, 3)):
        mine, first = block(grown, position), block(base, 0)
        for name, tensor in mine.items():
            if name.removesuffix(".weight") not in lesa.MATRICES:
                assert torch.equal(tensor, first[name])
                continue
            left, rows = lesa.decompose([block(base, i)[name] for i in range(4)])
            predictor = lesa.train_predictor(rows, seed=3, epochs=2)
            with torch.no_grad():
                predicted = left @ predictor(torch.cat([rows[anchor - 1], rows[anchor]], dim=1))
            torch.testing.assert_close(tensor, predicted)
    again = upscale(base, options)
    assert all(
        torch.equal(a, b) for a, b in zip(grown.parameters(), again.parameters(), strict=True)
    )


def test_lesa_needs_three_blocks():
    with pytest.raises(MidusError, match="two neighbours"):
        sources("lesa", 2)


# The grown model.


@pytest.mark.parametrize("method", COPIES)
@every_family
def test_identity_is_kept_exactly_where_it_is_promised(family, method):
    base = tiny_base(family)
    grown = upscale(base, quick(method))
    assert type(grown) is type(base)
    difference = (grown(prompt_ids()).logits - base(prompt_ids()).logits).abs().max().item()
    assert (difference == 0.0) == METHODS[method].preserves_function
    assert [layer.self_attn.layer_idx for layer in grown.model.layers] == list(range(6))
    ids = grown.generate(prompt_ids(), max_new_tokens=6, do_sample=False, use_cache=True)
    plain = grown.generate(prompt_ids(), max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(ids, plain)


@pytest.mark.parametrize("method", METHODS)
def test_what_trains_is_what_the_method_says(method):
    grown = upscale(tiny_base(), quick(method))
    positions = plan_upscaling(tiny_config(), UpscaleConfig(method=method), {})[0].positions
    for name, parameter in grown.named_parameters():
        inserted = any(name.startswith(f"model.layers.{p}.") for p in positions)
        assert parameter.requires_grad == (inserted or METHODS[method].trains == "all"), name


@pytest.mark.parametrize("method", METHODS)
def test_stored_and_in_memory_agree_and_the_checkpoint_is_plain(tmp_path, method):
    base = save_base(tmp_path / "base")
    config = quick(method)
    done = upscale_checkpoint(tmp_path / "base", tmp_path / "out", config)
    assert (done.identity_blocks is not None) == METHODS[method].preserves_function
    in_memory, stored = upscale(base, config), load(tmp_path / "out")
    assert type(stored) is type(in_memory)
    state = in_memory.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in stored.state_dict().items())
    record = json.loads((tmp_path / "out" / "midus.json").read_text())
    assert record["method"] == method
    assert record["trainable"] == METHODS[method].trains
    assert record["base_model"]["fingerprint"].startswith("sha256-rows:")
    if METHODS[method].inserts != "memory":
        values = json.loads((tmp_path / "out" / "config.json").read_text())
        assert values["model_type"] == "llama"
        assert "auto_map" not in values
        assert not list((tmp_path / "out").glob("*.py"))
    assert describe(stored.config)["positions"] == done.plan.positions


@pytest.mark.parametrize("method", ["llama_pro", "opt_deus", "avg_deus"])
def test_copied_blocks_as_deltas(tmp_path, method):
    save_base(tmp_path / "base")
    config = quick(method)
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", config, delta=True)
    model = load_model(tmp_path / "delta")
    for position in METHODS[method].make_plan(config, 4).positions:
        model.model.layers[position].mlp.down_proj.weight.data += 0.1  # as if trained
    save_delta(model, tmp_path / "trained")
    merge_delta(tmp_path / "trained", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(merged).__name__ == "LlamaForCausalLM"
    state = model.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in merged.state_dict().items())
    files = {path.name for path in (tmp_path / "trained").iterdir()}
    assert "delta.safetensors" in files
    assert not any(name.startswith("model") for name in files)


@pytest.mark.parametrize("method", ["base", "solar", "stack", "gradual_stack"])
def test_methods_that_train_the_base_have_no_delta(tmp_path, method):
    save_base(tmp_path / "base")
    config = UpscaleConfig(method=method)
    with pytest.raises(MidusError, match="trains the base's weights too"):
        upscale_checkpoint(tmp_path / "base", tmp_path / "delta", config, delta=True)
    grown = upscale(load(tmp_path / "base"), config)
    with pytest.raises(MidusError, match="trains the base's weights too"):
        save_delta(grown, tmp_path / "delta")


@pytest.mark.parametrize("method", ["base", "solar"])
def test_training_everything_leaves_the_base_alone(method):
    base = tiny_base()
    before = base(prompt_ids()).logits
    grown = upscale(base, UpscaleConfig(method=method))
    for parameter in grown.parameters():
        parameter.data += 1
    assert torch.equal(base(prompt_ids()).logits, before)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("llama_pro", {"memory": MemoryConfig(kind="pkm")}),
        ("midus", {"ot_rescale": True}),
        ("opt_deus", {"lesa_epochs": 2}),
    ],
)
def test_options_of_another_method_are_refused(method, options):
    with pytest.raises(MidusError, match="leave it out for"):
        upscale(tiny_base(), UpscaleConfig(method=method, **options))


def test_set_trainable_after_loading(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "out", UpscaleConfig(method="llama_pro"))
    model = load(tmp_path / "out")
    assert all(p.requires_grad for p in model.parameters())
    set_trainable(model)
    trained = {n.split(".")[2] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"2", "5"}


@pytest.mark.parametrize("method", METHODS)
def test_stored_rotary_tables_are_left_behind(tmp_path, method):
    save_base(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, path, {"format": "pt"})
    upscale_checkpoint(tmp_path / "base", tmp_path / "out", quick(method))
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]


def test_a_bases_own_code_is_not_referred_to(tmp_path):
    save_base(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    values = {**json.loads(path.read_text()), "auto_map": {"AutoModelForCausalLM": "its.Own"}}
    path.write_text(json.dumps(values))
    upscale_checkpoint(tmp_path / "base", tmp_path / "out", UpscaleConfig(method="llama_pro"))
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_grown_model_can_grow_again_and_forgets_its_first_record(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "pro", UpscaleConfig(method="llama_pro"))
    upscale_checkpoint(tmp_path / "pro", tmp_path / "grown", UpscaleConfig(num_inserted=1))
    values = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert "midus" not in values
    assert values["num_hidden_layers"] == 7


def test_a_delta_keeps_the_users_card_and_brings_the_tokenizer(tmp_path):
    save_base(tmp_path / "base")
    grown = upscale(load(tmp_path / "base"), UpscaleConfig(method="llama_pro"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my own card")
    save_delta(grown, tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "my own card"
    (tmp_path / "mine" / "tokenizer.json").write_text("my own tokenizer")
    save_delta(grown, tmp_path / "mine")
    assert (tmp_path / "mine" / "tokenizer.json").read_text() == "my own tokenizer"
    save_delta(grown, tmp_path / "other")
    assert (tmp_path / "other" / "tokenizer.json").is_file()
    assert "midus.load_model" in (tmp_path / "other" / "README.md").read_text()


def test_only_grown_models_have_deltas(tmp_path):
    with pytest.raises(MidusError, match="was not grown by midus"):
        save_delta(tiny_base(), tmp_path / "delta")


def test_a_delta_is_not_a_base(tmp_path):
    save_base(tmp_path / "base")
    config = UpscaleConfig(method="llama_pro")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", config, delta=True)
    with pytest.raises(MidusError, match="make one with midus merge"):
        upscale_checkpoint(tmp_path / "delta", tmp_path / "out", config)


@pytest.mark.parametrize(
    "record",
    ["hello", {}, {"method": "solar", "trainable": "all", "positions": [2, 50], "anchors": [1, 2]}],
    ids=str,
)
def test_a_damaged_record_is_refused(midus, tmp_path, record):
    save_base(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "midus": record}))
    result = midus("inspect", tmp_path / "base")
    assert result.code == 2
    assert "does not describe a model of 4 blocks" in result.err


def test_the_record_is_read_from_its_file_too(midus, tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "out", UpscaleConfig(method="llama_pro"))
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    del values["midus"]
    path.write_text(json.dumps(values))
    assert json.loads(midus("inspect", tmp_path / "out", "--json").out)["method"] == "llama_pro"


def test_transport_that_has_not_converged_is_said():
    torch.manual_seed(0)
    first, second = 3 * torch.randn(64, 64), 3 * torch.randn(64, 64)
    with pytest.warns(UserWarning, match="did not come within ot_tolerance"):
        opt_deus.transport(first, second, UpscaleConfig(ot_max_iter=20))


def test_weights_that_are_not_numbers_are_refused():
    base = tiny_base()
    base.model.layers[1].self_attn.q_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(MidusError, match="not finite"):
        upscale(base, quick("lesa"))


def test_lesa_in_inference_mode():
    with torch.inference_mode():
        upscale(tiny_base(), quick("lesa"))


def test_a_plain_save_keeps_the_record(tmp_path):
    """What a Trainer writes: transformers' own save of a copied-block model."""
    upscale(tiny_base(), UpscaleConfig(method="llama_pro")).save_pretrained(tmp_path / "out")
    facts = describe(load(tmp_path / "out").config)
    assert facts["method"] == "llama_pro"
    assert facts["positions"] == [2, 5]


def test_sliding_windows_follow_the_copied_blocks():
    base = tiny_config("gemma2")
    plan, config = plan_upscaling(base, UpscaleConfig(method="gradual_stack"), {})
    assert config.layer_types == [base.layer_types[i] for i in plan.sources]

"""What `analyze_slots` reports, against counts and products by hand."""

import json
import math

import pytest
import torch
from tiny import VOCAB, each_bypass, every_family, fill_tables, grown, prompt_ids, tiny_base

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.analysis import slot_values
from midus.analysis.slot_contexts import (
    NUM_CONTEXTS,
    NUM_TOKENS,
    TOKENS_LEFT,
    TOKENS_RIGHT,
    is_hub,
)
from midus.analysis.slot_values import realised_values, token_logits, value_norms, written_values
from midus.analysis.slots import analyze_slots
from midus.errors import MidusError
from midus.memory import MEMORY_LAYERS

KINDS = [
    *(MemoryConfig(kind=kind, num_subkeys=8) for kind in MEMORY_LAYERS),
    MemoryConfig(num_subkeys=8, values="shared"),
    MemoryConfig(num_subkeys=8, values="independent"),
    MemoryConfig(num_subkeys=8, latent_dim=5, memory_output_proj=True),
    MemoryConfig(kind="pkm", num_subkeys=8, memory_output_proj=True),
]
every_kind = pytest.mark.parametrize("memory", KINDS, ids=lambda m: f"{m.kind}-{m.values}")


class Words:
    """A tokenizer of words w0, w1 ..., without pad or any other special token."""

    eos_token_id = None

    def convert_ids_to_tokens(self, token):
        return f"w{token}"

    def decode(self, ids, **_):
        return " ".join(f"w{i}" for i in ids)


def text(length=24, seed=3):
    return prompt_ids(length=length, seed=seed)[0]


def randomised(model):
    """Random output projections too, which start as the identity."""
    for name, parameter in model.named_parameters():
        if "memory_output_proj" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def choices(model, index, ids):
    """Slots and weights of one block, and what it read and wrote, by a hook of our own."""
    block, seen = model.model.layers[index], {}

    def look(layer, args, output):
        seen["attended"], seen["correction"] = args[0], output

    hook = block.memory.register_forward_hook(look)
    states = block.register_forward_hook(lambda _, args, out: seen.update(x=args[0], y=out))
    with torch.no_grad():
        model(ids.unsqueeze(0))
    hook.remove()
    states.remove()
    layer = block.memory
    with torch.no_grad():
        seen["slots"], seen["weights"] = layer.keys(layer.make_queries(seen["attended"]))
    return seen


def constant_choice(chosen, num_subkeys=8):
    """A model whose first block chooses, for every token, the given (rows, columns) of each head.

    The norm of the queries makes them all ones, so a sub-key's score is the sum of its entries.
    """
    memory = MemoryConfig(num_subkeys=num_subkeys, top_k=2, query_norm="layer")
    model = upscale(tiny_base(), UpscaleConfig(memory=memory))
    layer = model.model.layers[model.config.memory_positions[0]].memory
    layer.query_norm.weight.data.zero_()
    layer.query_norm.bias.data.fill_(1.0)
    for head, (rows, cols) in enumerate(chosen):
        for keys, picked in ((layer.keys.row_keys, rows), (layer.keys.col_keys, cols)):
            keys.data[head] = -1.0
            # First and second: 3 and 1 for rows, 2 and 1 for columns leave no ties among pairs.
            best = 3.0 if keys is layer.keys.row_keys else 2.0
            keys.data[head, picked[0]] = best
            keys.data[head, picked[1]] = 1.0
    return fill_tables(model)


def reader(token=7):
    """A model whose first block reads the embeddings, and whose head 0 knows one token.

    Head 0 has row and column 3 for that token and 5 for all others.
    """
    memory = MemoryConfig(num_subkeys=8, top_k=1, attention_residual=True, attn_output_proj=True)
    model = upscale(tiny_base(), UpscaleConfig(memory=memory, positions=(0, 3)))
    block = model.model.layers[0]
    block.self_attn.o_proj.weight.data.zero_()
    known, other = torch.zeros(8), torch.zeros(8)
    known[[0, 4]] = 4.0  # one in the half for rows, one in that for columns
    other[[1, 5]] = 4.0
    embedding = model.model.embed_tokens.weight.data
    embedding[:, :8] = other
    embedding[token, :8] = known
    for keys in (block.memory.keys.row_keys, block.memory.keys.col_keys):
        keys.data[0] = 0.0
        keys.data[0, 3, 0] = 1.0
        keys.data[0, 5, 1] = 1.0
    return fill_tables(model)


def test_use_is_that_of_the_slots_the_layers_choose():
    model, ids = grown(), text()
    report = analyze_slots(model, Words(), ids, window=24)
    assert [block.index for block in report.blocks] == list(model.config.memory_positions)
    block = report.blocks[1]
    seen = choices(model, block.index, ids)
    counts, weights = torch.zeros(4, 64), torch.zeros(4, 64)
    for token in range(24):
        for head in range(4):
            for place in range(4):
                slot = seen["slots"][0, token, head, place]
                counts[head, slot] += 1
                weights[head, slot] += seen["weights"][0, token, head, place]
    assert block.used == pytest.approx((counts > 0).sum().item() / (4 * 64))
    for amounts, found in ((counts, block.entropy), (weights, block.weighted_entropy)):
        entropies = []
        for head in range(4):
            shares = [a / amounts[head].sum().item() for a in amounts[head].tolist() if a]
            entropies.append(-sum(s * math.log(s) for s in shares))
        assert found == pytest.approx(sum(entropies) / 4 / math.log(64), rel=1e-5)
    assert block.dead_slots == [sum(c == 0 for c in row) for row in counts.tolist()]
    assert block.slots_no_head_uses == sum(c == 0 for c in counts.sum(0).tolist())
    # 1 % of 256 pairs, rounded up: the three busiest.
    largest = sorted(counts.flatten().tolist())[-3:]
    assert block.busiest_percent_share == pytest.approx(sum(largest) / (24 * 4 * 4))
    curve = block.rank_frequency
    ranked = sorted(counts.flatten().tolist(), reverse=True)
    assert curve["rank"][-1] == (counts > 0).sum()
    assert curve["share"] == pytest.approx([ranked[rank - 1] / 384 for rank in curve["rank"]])


def test_overlap_of_constructed_choices():
    # Slots, best two pairs: (r1, c1) and (r1, c2), since columns differ by less than rows.
    model = constant_choice(
        [((0, 1), (2, 3)), ((0, 4), (2, 5)), ((6, 7), (6, 7)), ((0, 1), (2, 3))]
    )
    block = analyze_slots(model, Words(), text(), window=12).blocks[0]
    # Heads 0 and 3 have slots 2, 3; head 1 has 2, 5; head 2 has 54, 55. Each count is the same.
    third = 1 / 3
    expected = [[1, third, 0, 1], [third, 1, 0, third], [0, 0, 1, 0], [1, third, 0, 1]]
    assert torch.allclose(torch.tensor(block.head_overlap["jaccard"]), torch.tensor(expected))
    half = [[1, 0.5, 0, 1], [0.5, 1, 0, 0.5], [0, 0, 1, 0], [1, 0.5, 0, 1]]
    assert torch.allclose(torch.tensor(block.head_overlap["cosine"]), torch.tensor(half))
    assert block.head_overlap["mean_jaccard"] == pytest.approx((1 + 2 * third) / 6)
    assert block.head_overlap["mean_cosine"] == pytest.approx((1 + 2 * 0.5) / 6)
    # Two slots of 64 each: 4/64 in common; two entries of 1/sqrt(2): sum squared over 64.
    assert block.head_overlap["chance_jaccard"] == pytest.approx((4 / 64) / (4 - 4 / 64))
    assert block.head_overlap["chance_cosine"] == pytest.approx(2 / 64)
    assert block.used == 8 / 256
    assert block.entropy == pytest.approx(math.log(2) / math.log(64))
    # Scores differ by 4 (a half query of ones, 2 against 1), and so do the weights' logarithms.
    high = 1 / (1 + math.exp(-4))
    entropy = -(high * math.log(high) + (1 - high) * math.log(1 - high))
    assert block.weighted_entropy == pytest.approx(entropy / math.log(64), rel=1e-4)
    assert block.dead_slots == [62] * 4
    assert block.slots_no_head_uses == 64 - 5


@pytest.mark.filterwarnings("ignore:top_k=1")
def test_a_token_that_always_fires_a_slot_is_found_with_its_contexts():
    model = reader(token=7)
    ids = torch.tensor([7, 10, 11, 7, 12, 13, 14, 10, 7, 10, 15, 16])
    report = analyze_slots(model, Words(), ids, window=6, block=0, top=100)
    found = {(s["head"], s["slot"]): s for s in report.busiest["slots"]}
    slot = found[0, 3 * 8 + 3]
    assert (slot["row"], slot["col"]) == (3, 3)
    assert slot["count"] == 3
    assert slot["weight"] == pytest.approx(3)  # the only slot read has weight 1
    assert slot["tokens"] == [{"token": "w7", "count": 3, "lift": 4.0}]
    # w10 follows twice of three times, and is 3 of the 12 tokens; w12 once, and 1 of 12.
    assert slot["next_tokens"] == [
        {"token": "w10", "count": 2, "lift": pytest.approx(2 / 3 / (3 / 12))},
        {"token": "w12", "count": 1, "lift": pytest.approx(1 / 3 / (1 / 12))},
    ]
    contexts = [(c["left"], c["token"], c["right"]) for c in slot["contexts"]]
    # What stands to the left of a window was not read and is not shown.
    assert contexts == [
        ("", "w7", "w10 w11 w7 w12 w13 w14 w10 w7"),
        ("w7 w10 w11", "w7", "w12 w13 w14 w10 w7 w10 w15 w16"),
        ("w14 w10", "w7", "w10 w15 w16"),
    ]
    others = found[0, 5 * 8 + 5]
    assert others["count"] == 9
    assert "w7" not in [t["token"] for t in others["tokens"]]
    assert report.busiest["slots"][0]["weight"] == max(s["weight"] for s in found.values())


def test_contexts_are_the_strongest_distinct_ones_and_of_bounded_length():
    model = grown()
    ids = torch.cat([text(60), text(60)])  # the second half repeats the first
    report = analyze_slots(model, Words(), ids, window=60, top=3)
    assert len(report.busiest["slots"]) == 3
    seen = choices(model, report.busiest["block"], ids[:60])  # both windows are alike
    summed = torch.zeros(4, 64)
    for head in range(4):
        chosen, weights = seen["slots"][0, :, head].flatten(), seen["weights"][0, :, head].flatten()
        summed[head].scatter_add_(0, chosen.long(), weights)
    found = [64 * slot["head"] + slot["slot"] for slot in report.busiest["slots"]]
    assert found == summed.flatten().topk(3).indices.tolist()
    for slot in report.busiest["slots"]:
        fired = seen["slots"][0, :, slot["head"]] == slot["slot"]
        weights = (seen["weights"][0, :, slot["head"]] * fired).sum(-1).tolist()
        assert slot["weight"] == pytest.approx(2 * sum(weights), rel=1e-4)
        assert slot["count"] == 2 * fired.sum().item()
        strongest = sorted(range(120), key=lambda p: (-weights[p % 60], p))
        expected, known = [], set()
        for p in strongest[: slot["count"]]:
            window = p - p % 60
            around = tuple(ids[max(window, p - 3) : p + 3].tolist())
            if around not in known:
                left = ids[max(window, p - TOKENS_LEFT) : p].tolist()
                right = ids[p + 1 : p + 1 + TOKENS_RIGHT].tolist()
                expected.append((Words().decode(left), Words().decode(right)))
            known.add(around)
        assert len(known) < slot["count"]
        assert [(c["left"], c["right"]) for c in slot["contexts"]] == expected[:NUM_CONTEXTS]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("output_proj", [False, True])
def test_promoted_tokens_are_those_of_the_value_through_norm_and_unembedding(family, output_proj):
    memory = MemoryConfig(num_subkeys=8, memory_output_proj=output_proj)
    model = randomised(grown(family, memory=memory))
    torch.nn.init.normal_(model.model.norm.weight)
    report = analyze_slots(model, Words(), text(), window=24, top=2)
    slot = report.busiest["slots"][1]
    block = model.model.layers[report.busiest["block"]]
    values = block.memory.values
    vector = torch.zeros(32)
    begin = slot["head"] * 8
    vector[begin : begin + 8] = values.latent_values[slot["slot"]] @ values.value_proj[slot["head"]]
    if output_proj:
        vector = block.memory_output_proj.weight @ vector
    gain = model.model.norm.weight + (1 if family == "gemma2" else 0)
    logits = model.lm_head.weight @ (gain * vector)
    order = logits.argsort(descending=True).tolist()
    assert slot["value_norm"] == pytest.approx(vector.norm().item(), rel=1e-4)
    assert [t["token"] for t in slot["promotes"]] == [f"w{i}" for i in order[:NUM_TOKENS]]
    assert [t["token"] for t in slot["suppresses"]] == [f"w{i}" for i in order[::-1][:NUM_TOKENS]]
    assert [t["logit"] for t in slot["promotes"]] == pytest.approx(
        logits[order[:NUM_TOKENS]].tolist(), rel=1e-3
    )


@every_kind
def test_weighted_values_add_up_to_the_correction(memory):
    model = randomised(grown(memory=memory))
    index = model.config.memory_positions[1]
    block = model.model.layers[index]
    if memory.kind == "ultramem":  # equal cores have equal scores: one weight a slot
        block.memory.keys.cores.data[1] = block.memory.keys.cores.data[0]
    seen = choices(model, index, text())
    weights = seen["weights"][..., 0] if memory.kind == "ultramem" else seen["weights"]
    token = 5
    total = torch.zeros(32)
    with torch.no_grad():
        for head in range(4):
            slots = seen["slots"][0, token, head].long()
            total += weights[0, token, head] @ written_values(block, head, slots)
    correction = (seen["y"] - seen["x"])[0, token]
    assert torch.allclose(total, correction, atol=1e-4)
    assert correction.norm() > 0.1


@every_kind
def test_norms_are_those_of_what_each_slot_writes(memory):
    model = randomised(grown(memory=memory))
    block = model.model.layers[model.config.memory_positions[0]]
    norms = value_norms(block)
    assert norms.shape == (4 if memory.kind == "hml" else 1, block.memory.num_slots)
    with torch.no_grad():
        for head in range(len(norms)):
            for slot in (0, 17, 63):
                written = written_values(block, head, torch.tensor([slot]))
                assert norms[head, slot].item() == pytest.approx(written.norm().item(), rel=1e-4)


def test_norm_quantiles_and_untouched_rows():
    model = grown()
    index = model.config.memory_positions[0]
    values = model.model.layers[index].memory.values
    values.latent_values.data[[3, 9, 40]] = 0
    found = analyze_slots(model, Words(), text(), window=24).blocks[0].value_norms
    norms = []
    for head in range(4):
        for slot in range(64):
            norms.append((values.latent_values[slot] @ values.value_proj[head]).norm().item())
    norms.sort()
    assert (found["zero_rows"], found["num_rows"]) == (3, 64)
    assert found["min"] == 0
    assert found["max"] == pytest.approx(norms[-1], rel=1e-5)
    assert found["median"] == pytest.approx((norms[127] + norms[128]) / 2, rel=1e-5)
    assert norms[229] <= found["p90"] <= norms[230]
    assert sum(found["histogram"]["counts"]) == 256 - 4 * 3


def test_correction_ratio_is_the_mean_over_tokens():
    model, ids = grown(), text()
    for block in analyze_slots(model, Words(), ids, window=24).blocks:
        seen = choices(model, block.index, ids)
        sizes = (seen["y"] - seen["x"]).norm(dim=-1)
        assert block.correction_norm == pytest.approx(sizes.mean().item(), rel=1e-4)
        ratios = sizes / seen["x"].norm(dim=-1)
        assert block.correction_ratio == pytest.approx(ratios.mean().item(), rel=1e-4)


@each_bypass
def test_a_bypass_is_no_part_of_the_correction(bypass):
    memory = MemoryConfig(num_subkeys=8, bypass=bypass)
    model, ids = grown(memory=memory), text()
    for block in analyze_slots(model, Words(), ids, window=24).blocks:
        seen = choices(model, block.index, ids)
        correction = seen["correction"]
        if bypass == "joined":
            correction = correction @ model.model.layers[block.index].bypass.weight.T
        written = correction.norm(dim=-1).mean().item()
        assert block.correction_norm == pytest.approx(written, rel=1e-4)
        whole = (seen["y"] - seen["x"]).norm(dim=-1).mean().item()
        assert whole != pytest.approx(written, rel=1e-2)


def test_slots_of_a_joined_bypass_write_through_its_map():
    model = grown(memory=MemoryConfig(num_subkeys=8, values="independent", bypass="joined"))
    block = model.model.layers[1]
    value, weight = block.memory.values.values[2, 5], block.bypass.weight  # [8] and [32, 32]
    found = written_values(block, 2, torch.tensor([5]))[0]
    torch.testing.assert_close(found, weight[:, 16:24] @ value, rtol=1e-4, atol=1e-5)
    assert value_norms(block)[2, 5].item() == pytest.approx(found.norm().item(), rel=1e-4)


def test_the_block_with_the_largest_corrections_is_described():
    model = grown()
    for louder in model.config.memory_positions:
        model.model.layers[louder].memory.values.latent_values.data *= 100
        assert analyze_slots(model, Words(), text(), window=24).busiest["block"] == louder
        model.model.layers[louder].memory.values.latent_values.data /= 100


def test_a_fresh_model_has_zero_values_and_corrections():
    model = grown(filled=False)
    report = analyze_slots(model, Words(), text(), window=24, top=1)
    for block in report.blocks:
        assert block.correction_ratio == block.value_norms["max"] == 0
        assert block.value_norms["zero_rows"] == 64
    assert report.busiest["slots"][0]["promotes"][0]["logit"] == 0


def test_windows_are_read_apart_and_the_rest_is_left_out():
    model, first, second = grown(), text(seed=3), text(seed=4)
    once = analyze_slots(model, Words(), first, window=24)
    longer = analyze_slots(model, Words(), torch.cat([first, second[:23]]), window=24)
    assert longer.num_tokens == once.num_tokens == 24
    assert longer.blocks == once.blocks
    both = analyze_slots(model, Words(), torch.cat([first, second]), window=24, block=1, top=999)
    apart = [
        analyze_slots(model, Words(), ids, window=24, block=1, top=999) for ids in (first, second)
    ]
    assert torch.equal(counts_of(both), counts_of(apart[0]) + counts_of(apart[1]))


def counts_of(report):
    counts = torch.zeros(4, 64, dtype=torch.int64)
    for slot in report.busiest["slots"]:
        counts[slot["head"], slot["slot"]] = slot["count"]
    return counts


@every_kind
def test_every_memory_kind_is_analysed_and_leaves_no_hook(memory):
    model = grown(memory=memory)
    report = analyze_slots(model, Words(), text(), window=12, top=2)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [block["kind"] for block in values["blocks"]] == [memory.kind] * 2
    assert [block["anchor"] for block in values["blocks"]] == [1, 3]
    assert all(0 < block["used"] <= 1 for block in values["blocks"])
    assert all(block["correction_ratio"] > 0 for block in values["blocks"])
    slot = values["busiest"]["slots"][0]
    side = {"linear": None, "ultramem": 16}.get(memory.kind, 8)
    if side is None:
        assert slot["row"] is slot["col"] is None
    else:
        assert slot["row"] * side + slot["col"] == slot["slot"]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@every_family
def test_every_family_is_analysed(family):
    report = analyze_slots(grown(family), Words(), text(), window=24, top=1)
    assert all(block.correction_ratio > 0 for block in report.blocks)


def test_values_are_read_in_full_precision():
    model = grown().to(torch.bfloat16)
    layer = model.model.layers[model.config.memory_positions[0]].memory
    assert realised_values(layer, 0, torch.tensor([1])).dtype == torch.float32
    assert token_logits(model, torch.ones(1, 32)).dtype == torch.float32
    assert analyze_slots(model, Words(), text(), window=24, top=1).blocks[0].used > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 25}, "24 tokens, fewer than one window of 25"),
        ({"window": 20}, "window=20 is more than the 16 tokens the model reads"),
        (
            {"window": 24, "block": 2},
            "block=2 is no memory block .* choose one of 1, 4",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(options, said):
    limit = 16 if options["window"] == 20 else 24
    with pytest.raises(MidusError, match=said):
        analyze_slots(grown(max_position_embeddings=limit), Words(), text(), **options)


def test_a_model_without_memory_and_a_foreign_tokenizer_are_refused():
    with pytest.raises(MidusError, match="no memory blocks"):
        analyze_slots(tiny_base(), Words(), text(), window=24)
    with pytest.raises(MidusError, match=f"token {VOCAB}, .* vocabulary of {VOCAB}"):
        analyze_slots(grown(), Words(), torch.tensor([1, VOCAB]), window=2)


def test_norms_that_hardly_differ_have_a_histogram(monkeypatch):
    norms = torch.tensor([[1.5, torch.nextafter(torch.tensor(1.5), torch.tensor(2.0))]])
    monkeypatch.setattr(slot_values, "value_norms", lambda block: norms)
    block = grown().model.layers[1]
    assert sum(slot_values.describe_norms(block)["histogram"]["counts"]) == 2


def test_a_hub_fires_at_half_of_the_tokens():
    assert is_hub(8, 16)
    assert not is_hub(7, 16)

"""IS_h against a gate on the head, against sums by hand, and in batches."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny import MEMORY, TOLERANCE, every_family, fill_tables, grown, relative_error, tiny_base

from midus import MemoryConfig, MidusError, UpscaleConfig, upscale
from midus.analysis.examples import Example, encode_examples, read_examples
from midus.analysis.head_comparison import gini, list_layers, summarise
from midus.analysis.head_importance import head_importance

EPSILON = 1e-5


class Words:
    """A tokenizer of numbers; the first token of each text is BOS, as Llama's tokenizer does."""

    bos_token_id, eos_token_id = 1, 2

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [int(word) for word in text.split()]


class NoStart(Words):
    bos_token_id = eos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [int(word) for word in text.split()]


EXAMPLES = [
    Example("5 17 40", " 33 8"),
    Example("60", " 9 71 12 25"),
    Example("88 3 14 15 92", " 65"),
]


def in_float64(model):
    """The model in float64 throughout: Llama's norms compute in float32, too rough to differ."""
    model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    return model


def _norm(module, x):
    return module.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@torch.no_grad()
def loss_with_gate(model, example, layer, head, gate):
    """The continuation's summed loss with one head's output multiplied, all else recomputed."""
    context, continuation = (
        [int(w) for w in text.split()] for text in (example.context, example.continuation)
    )
    ids = torch.tensor([[1, *context, *continuation]])

    def scale(_, args):
        heads = args[0].unflatten(-1, (model.config.num_attention_heads, -1)).clone()
        heads[..., head, :] *= gate
        return (heads.flatten(-2),)

    hook = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(scale)
    logits = model(ids).logits[0]
    hook.remove()
    begin = 1 + len(context)
    return F.cross_entropy(logits[begin - 1 : -1], ids[0, begin:], reduction="sum").item()


def gate_derivatives(model, examples=EXAMPLES):
    """``[examples, L, H]``: central differences of each example's loss by each head's gate."""
    return torch.tensor(
        [
            [
                [
                    (
                        loss_with_gate(model, example, layer, head, 1 + EPSILON)
                        - loss_with_gate(model, example, layer, head, 1 - EPSILON)
                    )
                    / (2 * EPSILON)
                    for head in range(model.config.num_attention_heads)
                ]
                for layer in range(len(model.model.layers))
            ]
            for example in examples
        ],
        dtype=torch.float64,
    )


# Error of a central difference at this epsilon in float64, far above that of the sums compared.
GATE_TOLERANCE = 1e-6

VARIANTS = {
    "hml": MEMORY,
    "kept output projection": MemoryConfig(num_subkeys=8, attn_output_proj=True),
    "residual": MemoryConfig(num_subkeys=8, attention_residual=True, query_norm="layer"),
    "pkm": MemoryConfig(kind="pkm", num_subkeys=8),
    "bypass of attention": MemoryConfig(num_subkeys=8, bypass="attention"),
    "bypass of the stream": MemoryConfig(num_subkeys=8, bypass="stream"),
    "bypass of both": MemoryConfig(num_subkeys=8, bypass="both"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_importance_is_the_derivative_by_a_gate_in_base_and_memory_blocks(variant):
    model = in_float64(grown(memory=VARIANTS[variant], num_hidden_layers=2))
    expected = gate_derivatives(model).abs().mean(0)
    importance = head_importance(model, Words(), EXAMPLES)
    assert importance.dtype == torch.float64
    for layer in list_layers(model.config):  # each kind on its own: their sizes differ
        i = layer["index"]
        assert expected[i].min() > 0
        assert relative_error(importance[i], expected[i]) < GATE_TOLERANCE, layer


def test_importance_is_the_derivative_by_a_gate_in_copied_blocks():
    base = tiny_base(num_hidden_layers=2)
    model = in_float64(upscale(base, UpscaleConfig(method="solar", num_inserted=1)))
    assert [layer["kind"] for layer in list_layers(model.config)].count("copy") == 1
    expected = gate_derivatives(model, EXAMPLES[:1]).abs().mean(0)
    importance = head_importance(model, Words(), EXAMPLES[:1])
    assert relative_error(importance, expected) < GATE_TOLERANCE


def test_what_is_gated_in_a_memory_block_is_what_its_memory_reads():
    block = grown().model.layers[1]
    seen = {}
    block.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.update(a=args[0]))
    block.memory.register_forward_pre_hook(lambda _, args: seen.update(b=args[0]))
    x = torch.randn(1, 3, 32)
    tables = (torch.ones(1, 3, 8), torch.zeros(1, 3, 8))
    block(x, position_embeddings=tables, attention_mask=None)
    assert torch.equal(seen["a"], seen["b"])


def by_hand(model, ids, num_context):
    """Dot products a . dl/da of one example from autograd alone, ``[L, T, H]``; loss summed."""
    kept = []

    def keep(_, args):
        args[0].retain_grad()
        kept.append(args[0])

    hooks = [b.self_attn.o_proj.register_forward_pre_hook(keep) for b in model.model.layers]
    embeddings = model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings).logits[0].log_softmax(-1)
    loss = -sum(logits[i - 1, ids[i]] for i in range(num_context, len(ids)))
    loss.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return torch.stack([(a * a.grad)[0].unflatten(-1, (4, -1)).sum(-1) for a in kept]).detach()


def two_examples(model):
    """Tokens read: 3 and 4; predicted: 2 and 1."""
    examples = [Example("5", " 33 8"), Example("60 61 62", " 9")]
    return examples, by_hand(model, [1, 5, 33, 8], 2), by_hand(model, [1, 60, 61, 62, 9], 4)


@pytest.mark.parametrize("make", [tiny_base, grown])
def test_each_form_is_the_sum_written_out(make):
    model = make().double()
    examples, first, second = two_examples(model)
    tight = TOLERANCE[torch.float64]

    paper = (first.sum(1).abs() + second.sum(1).abs()) / 2
    assert relative_error(head_importance(model, Words(), examples), paper) < tight

    mean = (first.sum(1).abs() / 2 + second.sum(1).abs() / 1) / 2
    assert relative_error(head_importance(model, Words(), examples, loss="mean"), mean) < tight

    tokens = first.abs().sum(1) + second.abs().sum(1)
    tokens[:-1] /= 3 + 4
    tokens[-1] /= 2 + 1
    actual = head_importance(model, Words(), examples, reduction="token")
    assert relative_error(actual, tokens) < tight

    bansal = first.abs().sum(1) / 2 + second.abs().sum(1)
    bansal[:-1] /= 3 + 4
    bansal[-1] /= 2 + 1
    actual = head_importance(model, Words(), examples, reduction="token", loss="mean")
    assert relative_error(actual, bansal) < tight

    normed = torch.stack([row / sum(x**2 for x in row) ** 0.5 for row in paper])
    actual = head_importance(model, Words(), examples, layer_norm=True)
    assert relative_error(actual, normed) < tight
    assert not torch.allclose(paper, tokens)
    assert not torch.allclose(mean, paper)


def test_in_the_last_block_only_tokens_that_predict_reach_the_loss():
    dots = by_hand(tiny_base().double(), [1, 60, 61, 62, 9], 4)  # [L, T, H]
    assert dots[-1, :3].abs().max() == 0
    assert dots[-1, 3].abs().min() > 0
    assert dots[0, :4].abs().min() > 0
    assert dots[:, 4].abs().max() == 0  # the last token is only predicted


@pytest.mark.parametrize("options", [{}, {"reduction": "token", "loss": "mean"}])
@every_family
def test_padded_batches_score_as_one_by_one(family, options):
    model = grown(family).double()
    alone = head_importance(model, Words(), EXAMPLES, **options)
    assert alone.shape == (6, 4)
    together = head_importance(model, Words(), EXAMPLES, batch_size=3, **options)
    assert relative_error(together, alone) < TOLERANCE[torch.float64]
    uneven = head_importance(model, Words(), EXAMPLES, batch_size=2, **options)
    assert relative_error(uneven, alone) < TOLERANCE[torch.float64]


def test_a_fresh_memory_block_has_no_importance_and_changes_none():
    base = tiny_base().double()
    scores = head_importance(base, Words(), EXAMPLES)
    model = upscale(base, UpscaleConfig(memory=MEMORY))
    importance = head_importance(model, Words(), EXAMPLES)
    memory = list(model.config.memory_positions)
    assert importance[memory].abs().max() == 0
    own = [i for i in range(6) if i not in memory]
    assert relative_error(importance[own], scores) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_model_comes_back_as_it_was(is_frozen):
    model = grown()
    model.requires_grad_(not is_frozen)
    model.model.layers[0].train()
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        importance = head_importance(model, Words(), EXAMPLES)
    assert importance.min() > 0
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_error_in_the_middle_leaves_no_trace():
    model = grown()
    before = [parameter.requires_grad for parameter in model.parameters()]

    def interrupted(items, _):
        yield items[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        head_importance(model, Words(), EXAMPLES, track=interrupted)
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_bfloat16_scores_are_near_those_of_float32():
    model = grown()
    exact = head_importance(model, Words(), EXAMPLES)
    rough = head_importance(model.bfloat16(), Words(), EXAMPLES)
    assert rough.dtype == torch.float64
    assert torch.corrcoef(torch.stack([exact.flatten(), rough.flatten()]))[0, 1] > 0.9


def test_scores_that_are_no_numbers_are_refused():
    model = grown()
    fill_tables(model, scale=float("nan"))
    with pytest.raises(MidusError, match=r"importance of block 0 is not finite in torch\.float32"):
        head_importance(model, Words(), EXAMPLES)


def test_a_context_that_does_not_fit_loses_its_beginning():
    long = Example(" ".join(["7"] * 10 + ["8"] * 4), " 9 10")
    with pytest.warns(UserWarning, match="1 of 2 examples are longer than the model's 5 tokens"):
        cut, whole = encode_examples([long, EXAMPLES[0]], Words(), window=5)
    assert cut == ([8, 8, 8, 8, 9, 10], 4)
    assert whole == ([1, 5, 17, 40, 33, 8], 4)
    model = tiny_base(max_position_embeddings=8).double()
    with pytest.warns(UserWarning, match="8 tokens"):
        shortened = head_importance(model, Words(), [long])
    kept = by_hand(model, [7, 7, 7, 8, 8, 8, 8, 9, 10], 7)
    assert relative_error(shortened, kept.sum(1).abs()) < TOLERANCE[torch.float64]


def test_a_continuation_that_does_not_fit_is_refused():
    with pytest.raises(MidusError, match="a continuation has 4 tokens and the model reads 3"):
        encode_examples(EXAMPLES, Words(), window=3)


def test_spaces_at_the_end_of_a_context_go_to_the_continuation():
    class Characters:
        def encode(self, text):
            return [ord(character) for character in text]

    encoded = encode_examples([Example("ab ", "c")], Characters())[0]
    assert encoded == ([ord(c) for c in "ab c"], 2)


def test_an_example_without_context_begins_with_the_first_token():
    assert encode_examples([Example("", " 9 10")], Words())[0] == ([1, 9, 10], 1)
    with pytest.raises(MidusError, match="neither a BOS nor an EOS"):
        encode_examples([Example("", " 9 10")], NoStart())


def test_layers_are_named_by_kind_and_base_index():
    layers = list_layers(grown(num_hidden_layers=4).config)
    assert [(layer["kind"], layer["base_index"]) for layer in layers] == [
        ("base", 0), ("memory", 1), ("base", 1), ("base", 2), ("memory", 3), ("base", 3),
    ]  # fmt: skip
    assert [layer["index"] for layer in layers] == list(range(6))
    solar = upscale(tiny_base(), UpscaleConfig(method="solar", num_inserted=2)).config
    assert [(layer["kind"], layer["base_index"]) for layer in list_layers(solar)] == [
        ("base", 0), ("base", 1), ("base", 2), ("copy", 1), ("copy", 2), ("base", 3),
    ]  # fmt: skip
    assert [layer["kind"] for layer in list_layers(tiny_base().config)] == ["base"] * 4


def test_gini_is_the_mean_difference_of_two_heads():
    scores = torch.tensor([[1.0, 5.0, 2.0, 4.0], [3, 3, 3, 3], [0, 8, 0, 0], [0, 0, 0, 0]])
    rows = scores.tolist()
    expected = [
        sum(abs(x - y) for x in row for y in row) / (2 * 16 * (sum(row) / 4 or 1)) for row in rows
    ]
    assert gini(scores).tolist() == pytest.approx(expected)
    assert gini(scores)[2].item() == pytest.approx(3 / 4)


def test_the_summary_compares_the_blocks_of_the_base_only():
    base = torch.tensor([[1.0, 3.0], [2.0, 4.0], [5.0, 5.0]])
    model = torch.tensor([[2.0, 6.0], [100.0, 0.0], [2.0, 3.0], [5.0, 5.0]])
    layers = [
        {"index": i, "base_index": b, "kind": kind}
        for i, (b, kind) in enumerate([(0, "base"), (1, "memory"), (1, "base"), (2, "base")])
    ]
    summary = summarise(base, model, layers)
    assert summary["num_base_layers"] == 3
    assert summary["num_layers_of_higher_variance"] == 1
    # Variances 1, 1, 0 become 4, 1/4, 0; no ratio to nothing.
    assert summary["mean_variance_ratio"] == pytest.approx((4 + 0.25) / 2)
    assert summary["share_of_risen_heads"] == pytest.approx(2 / 6)
    assert summary["mean_importance"] == pytest.approx({"base": 20 / 6, "model": 23 / 6})


PIQA_ROW = {"goal": "boil eggs", "sol1": "use ice", "sol2": "use a pot ", "label": 1}


def test_rows_become_contexts_and_right_continuations(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [PIQA_ROW, {**PIQA_ROW, "label": 0.0}, {"context": "a b", "continuation": "c"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_examples(path) == [
        Example("Question: boil eggs\nAnswer:", " use a pot ", "piqa"),
        Example("Question: boil eggs\nAnswer:", " use ice", "piqa"),
        Example("a b", "c", "custom"),
    ]
    assert len(read_examples(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"rows\.jsonl:2: invalid JSON .*mend the row"),
        ("[1]", r"rows\.jsonl:2: a JSON list, not an object"),
        ('{"text": "x"}', r"rows\.jsonl:2: neither PIQA's fields .* the row has text"),
        (json.dumps({**PIQA_ROW, "label": -1}), r"rows\.jsonl:2: label=-1 must be 0 or 1"),
        ('{"goal": "x", "sol1": "y", "label": 1}', r"rows\.jsonl:2: sol2=None must be a text"),
        ('{"context": "x"}', r"rows\.jsonl:2: continuation=None must be a text"),
        ('{"context": "x", "continuation": ""}', r"rows\.jsonl:2: continuation is empty"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PIQA_ROW) + "\n" + line + "\n")
    with pytest.raises(MidusError, match=message):
        read_examples(path)


def test_bad_options_are_refused():
    model = tiny_base()
    with pytest.raises(MidusError, match="reduction='all' is unknown; choose example or token"):
        head_importance(model, Words(), EXAMPLES, reduction="all")
    with pytest.raises(MidusError, match="loss='max' is unknown; choose sum or mean"):
        head_importance(model, Words(), EXAMPLES, loss="max")
    with pytest.raises(MidusError, match="batch_size=0"):
        head_importance(model, Words(), EXAMPLES, batch_size=0)
    with pytest.raises(MidusError, match="no examples"):
        head_importance(model, Words(), [])
    with pytest.raises(MidusError, match="token 990 and the model has a vocabulary of 99"):
        head_importance(model, Words(), [Example("5", " 990")])

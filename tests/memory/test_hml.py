import pytest
import torch

from midus.config import MemoryConfig
from midus.errors import MidusError
from midus.memory import HeadwiseMemory, memory_layer_class

HIDDEN, HEADS = 24, 3


def make_layer(hidden=HIDDEN, heads=HEADS, attended=HIDDEN, **options):
    torch.manual_seed(0)
    config = MemoryConfig(**{"num_subkeys": 6, "top_k": 3, **options})
    return HeadwiseMemory(config, hidden, heads, attended)


def by_hand(layer, attended):
    """Eq. 5 token by token and head by head, over the whole grid of slots."""
    out = torch.zeros(*attended.shape[:-1], layer.values.value_proj.shape[2] * layer.num_heads)
    width, n = layer.query_dim, layer.keys.row_keys.shape[1]
    for b in range(attended.shape[0]):
        for t in range(attended.shape[1]):
            pieces = []
            for head in range(layer.num_heads):
                query = attended[b, t, head * width : (head + 1) * width]
                row = layer.keys.row_keys[head] @ query[: width // 2]
                col = layer.keys.col_keys[head] @ query[width // 2 :]
                scores = (row[:, None] + col[None, :]).flatten()
                best, slots = scores.topk(layer.keys.top_k)
                assert scores.numel() == n * n
                latent = best.softmax(0) @ layer.values.latent_values[slots]
                pieces.append(latent @ layer.values.value_proj[head])
            out[b, t] = torch.cat(pieces)
    return out


@pytest.mark.parametrize(
    ("hidden", "attended", "latent_dim"), [(24, 24, None), (24, 24, 5), (24, 36, None)]
)
def test_layer_is_the_papers_formula(hidden, attended, latent_dim):
    layer = make_layer(hidden, HEADS, attended, latent_dim=latent_dim)
    torch.nn.init.normal_(layer.values.latent_values)
    inputs = torch.randn(2, 4, attended)
    torch.testing.assert_close(layer(inputs), by_hand(layer, inputs), rtol=1e-5, atol=1e-5)


def test_correction_is_zero_before_training():
    assert not make_layer()(torch.randn(2, 5, HIDDEN)).any()


def test_heads_have_distinct_keys_and_share_one_table():
    layer = make_layer()
    assert layer.keys.row_keys.shape == (HEADS, 6, HIDDEN // HEADS // 2)
    assert not torch.equal(layer.keys.row_keys[0], layer.keys.row_keys[1])
    assert not torch.equal(layer.keys.row_keys, layer.keys.col_keys)
    assert layer.values.latent_values.shape == (36, HIDDEN // HEADS)


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_keys_start_at_the_scale_of_their_width(init):
    layer = make_layer(hidden=256, heads=2, attended=256, num_subkeys=64, key_init=init)
    keys = layer.keys.row_keys
    bound = keys.shape[-1] ** -0.5
    std = bound / 3**0.5 if init == "uniform" else bound
    assert keys.std().item() == pytest.approx(std, rel=0.05)
    assert (keys.abs().max() <= bound) == (init == "uniform")


def test_value_projections_start_as_asked():
    identity = make_layer(value_proj_init="identity").values.value_proj
    assert torch.equal(identity, torch.eye(8).expand(3, 8, 8))
    normal = make_layer(hidden=256, heads=2, attended=256).values.value_proj
    assert normal.std().item() == pytest.approx(128**-0.5, rel=0.05)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_query_norm_is_applied_before_the_keys(norm):
    layer = make_layer(query_norm=norm)
    torch.nn.init.normal_(layer.values.latent_values)
    inputs = torch.randn(2, 4, HIDDEN)
    out = layer(inputs)
    if norm == "layer":
        normed = torch.nn.functional.layer_norm(inputs.view(2, 4, HEADS, 8), (8,)).flatten(-2)
    else:
        flat = inputs.flatten(0, 1)
        normed = (flat - flat.mean(0)) / (flat.var(0, unbiased=False) + 1e-5).sqrt()
        normed = normed.view_as(inputs)
    torch.testing.assert_close(out, by_hand(layer, normed), rtol=1e-4, atol=1e-5)


def test_only_the_table_has_a_gradient_at_the_start_and_all_after_one_step():
    layer = make_layer()
    inputs = torch.randn(2, 4, HIDDEN)
    target = torch.randn(2, 4, HIDDEN)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        (layer(inputs) - target).square().sum().backward()
        moved = {name for name, p in layer.named_parameters() if p.grad.abs().max() > 0}
        assert moved == (
            {"values.latent_values"} if step == 0 else {n for n, _ in layer.named_parameters()}
        )
        optimizer.step()


def test_top_1_gives_keys_no_gradient():
    layer = make_layer(top_k=1)
    torch.nn.init.normal_(layer.values.latent_values)
    layer(torch.randn(2, 4, HIDDEN)).square().sum().backward()
    assert not layer.keys.row_keys.grad.any()
    assert layer.values.value_proj.grad.any()


def test_odd_head_width_is_refused():
    with pytest.raises(MidusError, match="head_dim=5 is odd"):
        make_layer(hidden=15, heads=3, attended=15)


def test_indivisible_hidden_size_is_refused():
    with pytest.raises(MidusError, match="hidden_size=25 is not divisible by num_heads=3"):
        make_layer(hidden=25)


def test_unknown_layer_lists_the_known_ones():
    with pytest.raises(MidusError, match="'hlm' is unknown; choose one of hml"):
        memory_layer_class("hlm")

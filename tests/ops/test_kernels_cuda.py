"""What only a CUDA device can show of the kernels: graphs, other devices' habits, sizes."""

import pytest
import torch
from layers import ERROR, Shape, error, random_layer, with_slots

from midus import MemoryConfig
from midus.memory import HeadwiseMemory
from midus.ops import headwise_memory, headwise_memory_cached, linear_topk, rms_norm, tucker_topk

pytestmark = pytest.mark.gpu

SHAPE = Shape(tokens=300, heads=9, query=64, subkeys=64, top_k=4, latent=64, output=64)


def gradients(layer, function=headwise_memory, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in layer]
    function(*leaves, 4, **options).float().square().sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("tokens", [1, 4, 16, 300])
@pytest.mark.parametrize("search", ["two_stage", "cartesian"])
def test_cuda_graph_replays_give_the_eager_result(tokens, search):
    layer = random_layer(SHAPE._replace(tokens=tokens), torch.bfloat16)
    cache = torch.matmul(layer.latent_values, layer.value_proj)
    functions = [
        lambda: headwise_memory(*layer, 4, search=search),
        lambda: headwise_memory_cached(*layer[:3], cache, 4, search=search),
    ]
    for function in functions:
        expected = function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = function()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_training_step_in_a_cuda_graph():
    layer = random_layer(SHAPE, torch.bfloat16)
    expected = gradients(layer)
    leaves = [tensor.detach().requires_grad_() for tensor in layer]

    def step():
        return torch.autograd.grad(headwise_memory(*leaves, 4).float().square().sum(), leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("trains", [False, True])
def test_norm_of_a_stream_in_a_cuda_graph(trains):
    torch.manual_seed(0)
    hidden = torch.randn(4096, 576, device="cuda").requires_grad_()
    added = torch.randn_like(hidden).bfloat16().requires_grad_()
    weight = torch.randn(576, device="cuda").requires_grad_(trains)
    leaves = [hidden, added, *([weight] if trains else [])]

    def step(backend="triton"):
        out = rms_norm(hidden, weight, 1e-5, added, torch.bfloat16, 3, backend=backend)
        return torch.autograd.grad(sum(t.float().square().mean() for t in out), leaves)

    expected, plain = step(), step("reference")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    for leaf, ours, theirs in zip(leaves, grads, plain, strict=True):
        assert error(ours, theirs) < ERROR[leaf.dtype] + ERROR[torch.bfloat16]


def check_search_in_a_cuda_graph(search, scores_of, leaves):
    """Slots of the reference, scores and gradients of float64, and the same bits in a graph."""
    # Nothing of an earlier pass may be alive: its nodes are of another stream than the capture's.
    with torch.no_grad():
        slot_idx, scores = search(*leaves, 4)
    grad = torch.randn_like(scores)

    def step():
        slot_idx, scores = search(*leaves, 4)
        return slot_idx, scores.detach(), *torch.autograd.grad(scores, leaves, grad)

    eager = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
    # Sums in another order may swap scores that agree in nearly all their bits.
    plain = search(*leaves, 4, backend="reference")[0]
    assert (slot_idx == plain).all(-1).float().mean() > 0.999
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = scores_of(*wide, slot_idx)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-5)
    expected.backward(grad.double())
    for leaf, grad_leaf, double in zip(leaves, eager[2:], wide, strict=True):
        assert error(grad_leaf, double.grad) < 2 * max(ERROR[leaf.dtype], ERROR[leaves[0].dtype])


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_search_in_a_cuda_graph(dtype, width, tokens):
    torch.manual_seed(0)
    queries = torch.randn(tokens, 9, width, device="cuda").to(dtype).requires_grad_()
    keys = (torch.randn(9, 4096, width, device="cuda") * width**-0.5).requires_grad_()

    def scores_of(queries, keys, slot_idx):
        return torch.einsum("the,hne->thn", queries, keys).gather(-1, slot_idx)

    check_search_in_a_cuda_graph(linear_topk, scores_of, [queries, keys])


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tucker_search_in_a_cuda_graph(dtype, tokens):
    torch.manual_seed(0)
    queries = [torch.randn(tokens, 9, 32, device="cuda").to(dtype) for _ in range(2)]
    keys = [torch.randn(9, 128, 32, 2, device="cuda") * 32**-0.5 for _ in range(2)]
    cores = torch.rand(2, 9, 2, 2, device="cuda")

    def scores_of(row_queries, col_queries, row_keys, col_keys, cores, slot_idx):
        rows = torch.einsum("the,hner->thnr", row_queries, row_keys)
        cols = torch.einsum("the,hner->thnr", col_queries, col_keys)
        shape = (*slot_idx.shape, 2)
        rows = rows.gather(2, (slot_idx // 128).unsqueeze(-1).expand(shape))
        cols = cols.gather(2, (slot_idx % 128).unsqueeze(-1).expand(shape))
        return torch.einsum("thkr,chrs,thks->thkc", rows, cores, cols)

    leaves = [tensor.requires_grad_() for tensor in (*queries, *keys, cores)]
    check_search_in_a_cuda_graph(tucker_topk, scores_of, leaves)


def test_inductor_gives_the_eager_gradients():
    layer = random_layer(SHAPE, torch.float32)
    compiled = torch.compile(headwise_memory, fullgraph=True)
    for a, b in zip(gradients(layer, compiled), gradients(layer), strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_is_the_same_to_the_bit_at_full_size(dtype):
    shape = Shape(2048, 32, 128, 64, 4, 128, 128)
    layer = random_layer(shape, dtype)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = gradients(layer), gradients(layer)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_more_than_two_to_the_31_elements():
    # 2^31 is passed by queries, output, latent and their gradients; the last tokens are checked.
    tokens, heads, width = (1 << 24) + 40, 2, 64
    torch.manual_seed(0)
    queries = torch.randn(tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    assert queries.numel() > 1 << 31
    small = random_layer(Shape(1, heads, width, 16, 4, width, width), torch.bfloat16)
    leaves = [tensor.detach().requires_grad_() for tensor in (queries, *small[1:])]
    out = headwise_memory(*leaves, 4)
    grad_out = torch.zeros_like(out)
    tail = slice(tokens - 50, tokens)
    grad_out[tail] = torch.randn(50, heads, width, device="cuda").bfloat16()
    grads = torch.autograd.grad(out, leaves, grad_out)
    wide = small._replace(queries=queries[tail].clone()).wide()
    slot_idx = torch.ops.midus.headwise_memory(
        queries[tail].contiguous(), *small[1:], 4, False, True
    )[1]
    expected = with_slots(wide, slot_idx)
    expected.backward(grad_out[tail].double())
    assert error(out[tail], expected) < ERROR[torch.bfloat16]
    assert error(grads[0][tail], wide.queries.grad) < ERROR[torch.bfloat16]
    assert not grads[0][: tokens - 50].any()
    for grad, leaf in zip(grads[1:], wide[1:], strict=True):
        assert error(grad, leaf.grad) < ERROR[torch.bfloat16]


def test_bfloat16_picks_the_slots_of_float32_arithmetic():
    layer = random_layer(SHAPE._replace(tokens=4096, query=128), torch.bfloat16)
    slots = torch.ops.midus.headwise_memory(*layer, 4, False, True)[1]
    wide = [tensor.float() for tensor in layer]
    wide_slots = torch.ops.midus.headwise_memory(*wide, 4, False, True)[1]
    same = (slots.sort(-1).values == wide_slots.sort(-1).values).all(-1).float().mean()
    assert same > 0.9999  # sums in another order may swap scores that agree in 24 bits


@pytest.mark.parametrize("kind", ["hml", "pkm", "linear", "ultramem"])
def test_memory_layers_have_the_gradients_of_the_reference(kind):
    from midus.memory import memory_layer_class

    torch.manual_seed(0)
    layer = memory_layer_class(kind)(MemoryConfig(kind=kind, num_subkeys=16), 64, 4, 64).double()
    for name, parameter in layer.named_parameters():
        if name.endswith(("latent_values", "values.values")):
            torch.nn.init.normal_(parameter)
    attended = torch.randn(2, 40, 64, dtype=torch.float64)
    layer(attended).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer = layer.float().cuda()
    layer.zero_grad()
    layer(attended.float().cuda()).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert error(parameter.grad.cpu(), expected[name]) < 1e-4, name


def test_fully_sharded_layer_trains(tmp_path):
    """FSDP2 in one process: parameters are sharded, gathered for the op and resharded."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        layer = HeadwiseMemory(MemoryConfig(num_subkeys=16), 64, 4, 64).cuda()
        torch.nn.init.normal_(layer.values.latent_values)
        attended = torch.randn(2, 40, 64, device="cuda")
        layer(attended).square().sum().backward()
        expected = {name: p.grad.clone() for name, p in layer.named_parameters()}
        layer.zero_grad()
        fully_shard(layer)
        layer(attended).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert error(parameter.grad.full_tensor(), expected[name]) < 1e-6
    finally:
        dist.destroy_process_group()


def test_functional_call_and_autocast():
    torch.manual_seed(0)
    layer = HeadwiseMemory(MemoryConfig(num_subkeys=16), 64, 4, 64).cuda()
    torch.nn.init.normal_(layer.values.latent_values)
    attended = torch.randn(2, 40, 64, device="cuda")
    weights = {name: p.detach().clone() for name, p in layer.named_parameters()}
    called = torch.func.functional_call(layer, weights, (attended,))
    assert torch.equal(called, layer(attended))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = layer(attended)
    assert out.dtype == torch.bfloat16
    assert error(out, called) < 1e-2
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_compiled_kernels_are_launched_by_addresses_and_a_cpu_tensor_is_refused(monkeypatch):
    from midus.ops import launch as module
    from midus.ops.gated import kernels

    monkeypatch.setattr(module, "_COMPILED", {})
    gate, up = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    first, second = kernels.gated_forward(gate, up), kernels.gated_forward(gate, up)
    ((_, direct, _),) = module._COMPILED.values()
    assert direct is not None  # Triton is one that we know
    assert torch.equal(first, second)
    args = (gate, up.cpu(), torch.empty_like(gate), 64)
    with pytest.raises(ValueError, match="cpu tensor"):
        module.launch(kernels._gated_fwd_kernel, (1,), args, kernels._CONSTANTS)

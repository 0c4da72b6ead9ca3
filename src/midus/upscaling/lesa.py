"""LESA (Yang et al., 2025): a small network predicts the block between two neighbours.

For each of a block's seven matrices, all L copies share one left basis: ``W_l = U diag(S) V_l``. A
predictor learns ``V_l`` from ``V_{l-1}`` and ``V_{l+1}``, row by row, and then fills the gaps:
``U diag(S) G(V_l, V_{l+1})`` is the new block between l and l + 1. Everything else of a new block
is copied from base block 0, as in the published notebooks.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from midus.config import UpscaleConfig
from midus.errors import MidusError
from midus.upscaling.copying import interleave_copies
from midus.upscaling.method import Growth, Method
from midus.upscaling.plan import StackPlan

_PLACEMENT = "top_heavy"
MATRICES = (
    "mlp.down_proj",
    "mlp.up_proj",
    "mlp.gate_proj",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
)
# The notebooks' settings.
_HIDDEN = 256
_LEARNING_RATE = 1e-3
_BATCH = 64
_NORM_WEIGHT = 5e-4


def make_plan(config: UpscaleConfig, num_base_layers: int) -> StackPlan:
    """A new block before every anchor, between it and the block before it."""
    if num_base_layers < 3:
        raise MidusError(
            f"method 'lesa' learns from blocks with two neighbours, and a base of "
            f"{num_base_layers} blocks has none; use another method"
        )
    return interleave_copies(config, num_base_layers, _PLACEMENT, "before", needs_left=True)


def make_blocks(growth: Growth) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Predicts all new blocks, matrix by matrix."""
    first = growth.base.read_block(0)
    blocks = {
        position: {name: tensor.to(growth.dtype).clone() for name, tensor in first.items()}
        for position, _ in growth.inserted()
    }
    epochs = growth.options.lesa_epochs
    # One step of the progress bar an epoch, so that it can tell early how long all will take.
    steps = iter(growth.track(range(len(MATRICES) * epochs), "training LESA's predictors"))
    for matrix in MATRICES:
        name = f"{matrix}.weight"
        weights = [growth.base.read(layer, name).float() for layer in range(len(growth.base))]
        left, rows = decompose(weights)
        predictor = train_predictor(rows, growth.options.seed, epochs, lambda: next(steps))
        for position, anchor in growth.inserted():
            pair = torch.cat([rows[anchor - 1], rows[anchor]], dim=1)
            with torch.no_grad():
                blocks[position][name] = (left @ predictor(pair)).to(growth.dtype)
    next(steps, None)  # the bar's last step
    yield from blocks.items()


def decompose(weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """``U diag(S)`` of all matrices side by side, and each one's ``V_l``: their product is W_l.

    Through the eigenvectors of ``sum W_l W_l^T`` in float64, which needs no matrix wider than one.
    """
    gram = sum((w.double() @ w.double().T for w in weights), torch.zeros(()))
    if not gram.isfinite().all():
        raise MidusError("the base has weights that are not finite numbers; nothing can be learned")
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    kept = values > values[0] * torch.finfo(torch.float64).eps * len(values)
    scale, basis = values[kept].sqrt(), vectors[:, kept]
    rows = [((basis.T @ w.double()) / scale.unsqueeze(1)).float() for w in weights]
    return (basis * scale).float(), rows


def make_predictor(width: int) -> nn.Sequential:
    """Two rows in, the row between them out."""
    return nn.Sequential(
        nn.Linear(2 * width, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, width),
    )


def train_predictor(
    rows: list[Tensor], seed: int, epochs: int, on_epoch: Callable[[], object] = lambda: None
) -> nn.Sequential:
    """Learns each inner block's rows from its neighbours' rows."""
    inputs = torch.cat(
        [torch.cat([rows[i - 1], rows[i + 1]], dim=1) for i in range(1, len(rows) - 1)]
    )
    targets = torch.cat(rows[1:-1])
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), torch.enable_grad():
        inputs, targets = inputs.clone(), targets.clone()  # made in whatever mode the caller is in
        torch.default_generator.manual_seed(seed)
        predictor = make_predictor(targets.shape[1])
        optimizer = torch.optim.AdamW(predictor.parameters(), lr=_LEARNING_RATE)
        for _ in range(epochs):
            on_epoch()
            for batch in torch.randperm(len(inputs)).split(_BATCH):
                predicted, target = predictor(inputs[batch]), targets[batch]
                size = (predicted.norm() - target.norm()).square()
                error = (predicted - target).square().mean()
                loss = (1 - _NORM_WEIGHT) * error + _NORM_WEIGHT * size
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return predictor.eval()


METHOD = Method(
    name="lesa",
    summary="blocks predicted from their neighbours by a small network",
    paper="Yang et al., 2025",
    inserts="copy",
    preserves_function=False,
    trains="inserted",
    default_placement=_PLACEMENT,
    make_plan=make_plan,
    make_blocks=make_blocks,
)

"""What an inserted block can see of the way down: its paths against the gradient of the loss.

    python benchmarks/gradient_paths.py study_data/math --json runs/gradient_paths.json

A fresh block may write anything into the residual stream; at first order the loss falls by how
much of the gradient there, -dL/dx of each token, its paths can express. Each path is fitted to it
by least squares (ridge, the best of a few strengths) on four fifths of the tokens of a text, and
the share of the gradient's power that it explains on the last fifth is printed. Shares are small,
since most of a token's gradient is its own noise; compare them with each other.

- linear, of what attention found (a'), of what attention reads (LN x), of the anchor's FFN before
  its last product, and of a' and FFN together, which is what a copied block starts with;
- HML's table, read by a' or by LN x (a norm a head), with random keys or keys from clusters, one
  that all heads share or one a head (own);
- a linear map of LN x and a table beside it.

A path with many parameters needs many tokens to show what it can do, so all of it is done with a
quarter of the tokens, too: what still grows has not shown all it can.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from midus import UpscaleConfig, upscale
from midus.data.tokens import TokenDataset, TokenFolder
from midus.memory.keys import ProductKeys
from midus.models.loading import load_model
from midus.reports import machine_name, write_result
from midus.training.key_start import cluster_directions

LENGTH, BATCH = 512, 4
NUM_SUBKEYS, TOP_K, KEY_LENGTH = 64, 4, 2.0
RIDGES = (0.1, 1.0, 10.0, 100.0)  # of the mean variance of a feature
FOLD_RIDGE = 10.0
TABLE_RIDGES = (30.0, 300.0, 3000.0)  # of one reading
STEPS = 12  # of conjugate gradients
FIRST = 5  # tokens of a sequence that hardly have a context


def read_paths(model: Any, tokens: Tensor, positions: list[int]) -> dict[int, dict[str, Tensor]]:
    """Features and ``-dL/dx`` of every token at some of the inserted blocks."""
    seen: dict[int, dict[str, Tensor]] = {position: {} for position in positions}
    found: dict[int, dict[str, list[Tensor]]] = {position: {} for position in positions}
    for position in positions:
        block, own = model.model.layers[position], seen[position]
        block.memory.register_forward_pre_hook(
            lambda _, args, own=own: own.update(a=args[0].detach())
        )
        block.register_forward_hook(lambda _, __, out, own=own: _keep(own, out))
    for ids in track(tokens.split(BATCH), "reading"):
        embedded = model.get_input_embeddings()(ids).requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits
        predicted, following = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        F.cross_entropy(predicted, following, reduction="sum").backward()
        for position, own in seen.items():
            block, anchor = model.model.layers[position], model.model.layers[position + 1]
            x = own["x"].detach()  # a fresh block returns what it reads
            with torch.no_grad():
                normed = anchor.post_attention_layernorm(x)
                ffn = anchor.mlp.act_fn(anchor.mlp.gate_proj(normed)) * anchor.mlp.up_proj(normed)
                features = {"a": own["a"], "x": block.input_layernorm(x), "ffn": ffn}
            for name, value in {**features, "grad": -own["x"].grad}.items():
                found[position].setdefault(name, []).append(value[:, FIRST:].flatten(0, 1))
    return {
        position: {name: torch.cat(parts) for name, parts in own.items()}
        for position, own in found.items()
    }


def _keep(own: dict[str, Tensor], out: Tensor) -> None:
    out.retain_grad()
    own["x"] = out


def explain(found: dict[str, Tensor], num_heads: int) -> dict[str, float]:
    """The share of the gradient that each path explains."""
    norms = found["grad"].norm(dim=-1)
    usual = norms < norms.quantile(0.995)  # a few tokens would decide everything
    a, x, ffn, target = (found[name][usual] for name in ("a", "x", "ffn", "grad"))
    target = target - target.mean(0)
    shares = {
        "linear a'": linear_share(a, target),
        "linear LN x": linear_share(x, target),
        "linear FFN": linear_share(ffn, target),
        "linear a' and FFN": linear_share(torch.cat([a, ffn], 1), target),
    }
    for name, read in {"a'": a, "LN x": x}.items():
        queries = read.unflatten(-1, (num_heads, -1))
        queries = F.layer_norm(queries, queries.shape[-1:])
        for start, is_own in (("random", False), ("clusters", False), ("clusters", True)):
            keys = make_keys(queries, start)
            path = f"table by {name}, {start}{', own' if is_own else ''}"
            shares[path] = table_share(keys, queries, target, is_own)
    rest, said = beyond_linear(x, target)
    for is_own in (False, True):  # by LN x and clusters, the last of those above
        path = f"linear and table by LN x{', own' if is_own else ''}"
        shares[path] = table_share(keys, queries, target, is_own, rest, said)
    return shares


def linear_share(features: Tensor, target: Tensor) -> float:
    """Of a linear map of the features."""
    train, test = _halves(len(target))
    return max(
        _share(target[test], said[test]) for said in _linear_maps(features, target, train, RIDGES)
    )


def beyond_linear(features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """What a linear map leaves of the target, and what it says of it.

    What is left of a token is of a map that has not seen it, which would leave too little.
    """
    train, test = _halves(len(target))
    half = train.stop // 2
    rest = target.clone()
    for seen, unseen in ((slice(0, half), slice(half, train.stop)),
                         (slice(half, train.stop), slice(0, half))):  # fmt: skip
        (said,) = _linear_maps(features, target, seen, (FOLD_RIDGE,))
        rest[unseen] -= said[unseen]
    maps = _linear_maps(features, target, train, RIDGES)
    return rest, max(maps, key=lambda said: _share(target[test], said[test]))


def _linear_maps(
    features: Tensor, target: Tensor, train: slice, ridges: tuple[float, ...]
) -> list[Tensor]:
    """What maps fitted on some of the tokens say of all, one a strength of the ridge."""
    mean = features[train].mean(0)
    known = (features[train] - mean).double()
    gram, seen = known.T @ known, known.T @ target[train].double()
    scale, eye = gram.diagonal().mean(), torch.eye(len(gram), dtype=gram.dtype)
    maps = [torch.linalg.solve(gram + ridge * scale * eye, seen).float() for ridge in ridges]
    return [(features - mean) @ m for m in maps]


def table_share(
    keys: ProductKeys,
    queries: Tensor,
    target: Tensor,
    is_own: bool = False,
    rest: Tensor | None = None,
    said: Tensor | None = None,
) -> float:
    """Of one table that all heads read, each into its own slice of the output; or of one a head.

    Args:
        keys: Of every head.
        queries: ``[T, H, E]``.
        target: ``[T, D]``.
        is_own: A table a head.
        rest: What it is fitted to; default: the target.
        said: What another path says of the target already.
    """
    train, test = _halves(len(target))
    num_heads = queries.shape[1]
    with torch.no_grad():
        slots, weights = keys(queries)  # [T, H, K]
    slices = (target if rest is None else rest).unflatten(-1, (num_heads, -1))  # [T, H, O]
    shares = []
    for ridge in TABLE_RIDGES:
        written = torch.zeros_like(slices[test])
        for heads in [[h] for h in range(num_heads)] if is_own else [list(range(num_heads))]:
            reading = _reading(slots[train, heads], weights[train, heads])
            values = _solve(reading, slices[train, heads].flatten(0, 1), ridge)  # [N, O]
            found = values[slots[test, heads]]
            written[:, heads] = (weights[test, heads].unsqueeze(-1) * found).sum(-2)
        whole = written.flatten(1) if said is None else said[test] + written.flatten(1)
        shares.append(_share(target[test], whole))
    return max(shares)


def _reading(slots: Tensor, weights: Tensor) -> Tensor:
    """How much of each slot every head of every token reads: ``[T * H, N]``, sparse."""
    num_lines = slots.shape[0] * slots.shape[1]
    lines = torch.arange(num_lines).unsqueeze(1).expand(-1, TOP_K)
    where = torch.stack([lines.flatten(), slots.flatten()])
    size = (num_lines, NUM_SUBKEYS**2)
    return torch.sparse_coo_tensor(where, weights.flatten(), size).coalesce()


def make_keys(queries: Tensor, start: str) -> ProductKeys:
    keys = ProductKeys(queries.shape[1], NUM_SUBKEYS, queries.shape[-1], TOP_K)
    if start == "clusters":
        halves = queries.transpose(0, 1)[:, ::4].chunk(2, dim=-1)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for own, half in zip((keys.row_keys, keys.col_keys), halves, strict=True):
                own.copy_(KEY_LENGTH * cluster_directions(half, NUM_SUBKEYS, generator))
    return keys


def _solve(reading: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """``(R^T R + ridge) V = R^T wanted`` by conjugate gradients."""
    back = reading.t()
    rest = torch.sparse.mm(back, wanted)
    values, way, size = torch.zeros_like(rest), rest.clone(), rest.square().sum(0)
    for _ in range(STEPS):
        seen = torch.sparse.mm(back, torch.sparse.mm(reading, way)) + ridge * way
        step = size / (way * seen).sum(0).clamp_min(1e-20)
        values, rest = values + step * way, rest - step * seen
        left = rest.square().sum(0)
        way, size = rest + left / size.clamp_min(1e-20) * way, left
    return values


def _halves(count: int) -> tuple[slice, slice]:
    cut = count * 4 // 5
    return slice(0, cut), slice(cut, count)


def _share(target: Tensor, written: Tensor) -> float:
    return 1 - ((target - written).square().sum() / target.square().sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", type=Path, help="A folder of midus data build.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-tokens", type=int, default=49_152)
    parser.add_argument("--blocks", type=int, default=5, help="Inserted blocks that are looked at.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = upscale(load_model(options.model, dtype=torch.float32, device="cpu"), UpscaleConfig())
    model.eval().requires_grad_(False)
    inserted = list(model.config.memory_positions)
    step = len(inserted) / options.blocks
    positions = [inserted[int((number + 0.5) * step)] for number in range(options.blocks)]
    dataset = TokenDataset(TokenFolder(options.tokens), "train", LENGTH)
    num_sequences = min(len(dataset), options.num_tokens // LENGTH)
    tokens = torch.stack([dataset[number]["input_ids"] for number in range(num_sequences)])
    rows = []
    num_heads = model.config.num_attention_heads
    for position, found in read_paths(model, tokens, positions).items():
        whole = len(found["grad"])
        for count in (whole // 4, whole):
            part = {name: values[:count] for name, values in found.items()}
            rows.append({"block": position, "tokens": count, **explain(part, num_heads)})
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v, int) else f"{1e3 * v:.2f}" for v in row.values()))
    Console(width=160).print(table, "shares x 1000")
    if options.json:
        write_result(options.json, rows, machine_name())


if __name__ == "__main__":
    main()

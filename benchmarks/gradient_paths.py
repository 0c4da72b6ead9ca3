"""What an inserted block can see of the way down: its paths against the gradient of the loss.

    python benchmarks/gradient_paths.py study_data/math --json runs/gradient_paths.json

A fresh block may write anything into the residual stream; at first order the loss falls by how
much of the gradient there, -dL/dx of each token, its paths can express. Each path is fitted to it
by least squares (ridge, the best of a few strengths) on four fifths of the tokens of a text, and
the share of the gradient's power that it explains on the last fifth is printed. Shares are small,
since most of a token's gradient is its own noise; compare them with each other.

- linear, of what attention found (a'), of what attention reads (LN x), of the anchor's FFN before
  its last product, and of a' and FFN together, which is what a copied block starts with;
- HML's table, read by a' or by LN x (a norm a head), with random keys or keys from clusters.
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
        for start in ("random", "clusters"):
            keys = make_keys(queries, start)
            shares[f"table by {name}, {start}"] = table_share(keys, queries, target)
    return shares


def linear_share(features: Tensor, target: Tensor) -> float:
    """Of a linear map of the features."""
    train, test = _halves(len(target))
    mean = features[train].mean(0)
    known = (features[train] - mean).double()
    gram, seen = known.T @ known, known.T @ target[train].double()
    scale, eye = gram.diagonal().mean(), torch.eye(len(gram), dtype=gram.dtype)
    maps = [torch.linalg.solve(gram + ridge * scale * eye, seen) for ridge in RIDGES]
    return max(_share(target[test], (features[test] - mean) @ m.float()) for m in maps)


def table_share(keys: ProductKeys, queries: Tensor, target: Tensor) -> float:
    """Of one table that all heads read, each into its own slice of the output."""
    train, test = _halves(len(target))
    num_heads = queries.shape[1]
    with torch.no_grad():
        slots, weights = keys(queries)  # [T, H, K]
    slices = target.unflatten(-1, (num_heads, -1))  # [T, H, O]
    rows = torch.arange(train.stop * num_heads).unsqueeze(1).expand(-1, TOP_K)
    where = torch.stack([rows.flatten(), slots[train].flatten()])
    size = (train.stop * num_heads, NUM_SUBKEYS**2)
    reading = torch.sparse_coo_tensor(where, weights[train].flatten(), size).coalesce()
    wanted = slices[train].flatten(0, 1)
    shares = []
    for ridge in TABLE_RIDGES:
        values = _solve(reading, wanted, ridge)  # [N, O]
        written = (weights[test].unsqueeze(-1) * values[slots[test]]).sum(-2)  # [T, H, O]
        shares.append(_share(target[test], written.flatten(1)))
    return max(shares)


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
    for position, found in read_paths(model, tokens, positions).items():
        rows.append({"block": position, **explain(found, model.config.num_attention_heads)})
    table = Table("block", *list(rows[0])[1:])
    for row in rows:
        table.add_row(*(str(v) if k == "block" else f"{1e3 * v:.2f}" for k, v in row.items()))
    Console(width=160).print(table, "shares x 1000")
    if options.json:
        write_result(options.json, rows, machine_name())


if __name__ == "__main__":
    main()

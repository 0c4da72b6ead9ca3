"""Keys that start where the base's queries are, by clustering them (beyond the paper).

Random keys cut the space of queries without looking at it. Here a fresh model, which computes what
its base computes, reads some tokens; each head's row and column queries are clustered, and the
directions of the clusters become the sub-keys. The mean query is taken out first and the keys are
made orthogonal to it: it would give every key a constant head start or handicap.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.memory.keys import ProductKeys
from midus.models.slots import memory_layers
from midus.training.listening import read_tokens

NUM_TOKENS = 16_384
_ITERATIONS = 10


@torch.no_grad()
def start_keys_from_queries(model: Any, batches: Iterable[Tensor], seed: int = 0) -> None:
    """Replaces the sub-keys of all memory layers; each keeps the mean length its keys had.

    Args:
        model: A fresh grown model, on the device where it runs.
        batches: Token ids ``[B, T]``, some 16,000 in all.
        seed: Of the clusters' first centres.
    """
    found: dict[int, Any] = dict(memory_layers(model))
    layers = {i: layer for i, layer in found.items() if isinstance(layer.keys, ProductKeys)}
    if not layers:
        raise MidusError(
            "key_start='queries' needs memory layers with product keys (hml, pkm); leave it out"
        )
    if any(table.any() for layer in layers.values() for table in layer.value_tables()):
        raise MidusError(
            "key_start='queries' replaces the keys of a fresh model, and this one has learned "
            "values that its keys lead to; use key_start: random, which leaves them as they are"
        )
    queries = _read_queries(model, layers, batches)
    for index, layer in layers.items():
        halves = queries[index].chunk(2, dim=-1)  # [H, P, E / 2] each
        for number, (keys, half) in enumerate(
            zip((layer.keys.row_keys, layer.keys.col_keys), halves, strict=True)
        ):
            generator = torch.Generator().manual_seed((seed << 16) + 2 * index + number)
            length = keys.norm(dim=-1).mean()
            keys.copy_(length * cluster_directions(half.float(), keys.shape[1], generator))


def first_batches(dataset: Any, batch_size: int) -> Iterator[Tensor]:
    """The first tokens of a dataset of sequences, as many as the keys are started from."""
    length = len(dataset[0]["input_ids"])
    num = min(len(dataset), -(-NUM_TOKENS // length))
    for start in range(0, num, batch_size):
        rows = range(start, min(start + batch_size, num))
        yield torch.stack([dataset[row]["input_ids"] for row in rows])


def _read_queries(
    model: Any, layers: dict[int, Any], batches: Iterable[Tensor]
) -> dict[int, Tensor]:
    """The queries each layer makes, ``[H, P, E]`` over all P tokens."""
    seen: dict[int, list[Tensor]] = {index: [] for index in layers}

    def listen(index: int) -> Any:
        def hook(layer: Any, args: tuple[Any, ...]) -> None:
            seen[index].append(layer.make_queries(args[0]).flatten(0, -3).transpose(0, 1))

        return hook

    hooks = [layer.register_forward_pre_hook(listen(i)) for i, layer in layers.items()]
    read_tokens(model, hooks, batches)
    return {index: torch.cat(parts, dim=1) for index, parts in seen.items()}


def cluster_directions(points: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Unit directions of spherical k-means, orthogonal to the points' mean: ``[H, num, W]``.

    Args:
        points: ``[H, P, W]``, clustered for each head on its own.
        num: Clusters a head; at most P.
        generator: Of the first centres, which are points drawn without repetition.
    """
    if points.shape[1] < num:
        raise MidusError(
            f"{points.shape[1]} tokens cannot start num_subkeys={num} keys; give more tokens"
        )
    mean = points.mean(dim=1, keepdim=True)  # [H, 1, W]
    axis = torch.nn.functional.normalize(mean, dim=-1)
    centred = points - mean
    centred = centred - (centred * axis).sum(-1, keepdim=True) * axis
    points = torch.nn.functional.normalize(centred, dim=-1)
    first = torch.randperm(points.shape[1], generator=generator)[:num].to(points.device)
    centres = points[:, first]  # [H, n, W]
    for _ in range(_ITERATIONS):
        nearest = (points @ centres.mT).argmax(-1)  # [H, P]
        sums = torch.zeros_like(centres)
        sums.scatter_add_(1, nearest.unsqueeze(-1).expand_as(points), points)
        moved = torch.nn.functional.normalize(sums, dim=-1)
        # A centre that nothing is nearest to stays where it is.
        centres = torch.where(sums.norm(dim=-1, keepdim=True) > 0, moved, centres)
    return centres

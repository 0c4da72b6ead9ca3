"""Reading a memory: the best slots of product keys, weighted rows of a table, and both at once."""

from typing import Literal

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.ops.dispatch import Backend, check_shape, takes_kernels
from midus.ops.headwise_memory import library as _headwise_memory_library
from midus.ops.headwise_memory import reference as _headwise_memory
from midus.ops.product_key_topk import library as _product_key_topk_library  # noqa: F401
from midus.ops.product_key_topk import reference as _product_key_topk
from midus.ops.weighted_gather import library as _weighted_gather_library  # noqa: F401
from midus.ops.weighted_gather import reference as _weighted_gather

Search = Literal["auto", "two_stage", "cartesian"]

# Up to here one program a token and head, over the whole grid, is as fast as two stages over a
# block of tokens (`ops/product_key_topk/README.md`).
_CARTESIAN_TOKENS = 4
_CARTESIAN_SUBKEYS = 64
# What one program's registers hold: a side of the whole grid, the scores and pairs of two stages.
_MAX_GRID = 128
_MAX_SUBKEYS = 512
_MAX_TOP_K = 32


def product_key_topk(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    top_k: int,
    backend: Backend = "auto",
    search: Search = "auto",
) -> tuple[Tensor, Tensor]:
    """Finds the ``top_k`` best slots of every head's product keys.

    Scores are accumulated and compared in float32 or wider whatever the inputs' types and whatever
    autocast says, so that bfloat16 inputs pick the slots float32 arithmetic picks. Of equal scores
    the lowest slot wins.

    Args:
        queries: ``[..., H, E]``; the first half of E meets the row keys, the second the columns.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        top_k: Slots to keep per head and query, at most n.
        backend: ``auto``, ``reference`` or ``triton``.
        search: ``two_stage``, ``cartesian`` (all n * n pairs at once), or ``auto`` by size.

    Returns:
        Flat slot numbers ``row * n + col`` and their scores, both ``[..., H, K]``, best first.
    """
    _check_keys(queries, row_keys, col_keys, top_k)
    use_triton = takes_kernels(backend, queries, row_keys, col_keys) and _fits_kernels(
        backend, row_keys.shape[1], top_k
    )
    cartesian = _use_cartesian(search, queries, row_keys, use_triton)
    if not use_triton:
        return _product_key_topk.product_key_topk(queries, row_keys, col_keys, top_k, cartesian)
    found: tuple[Tensor, Tensor] = torch.ops.midus.product_key_topk(
        queries, row_keys, col_keys, top_k, cartesian
    )
    return found


def weighted_gather(
    values: Tensor, slot_idx: Tensor, weights: Tensor, backend: Backend = "auto"
) -> Tensor:
    """Sums the rows of a table that each query selected, by their weights.

    Args:
        values: ``[N, R]``.
        slot_idx: ``[..., K]`` row numbers.
        weights: ``[..., K]``.
        backend: ``auto``, ``reference`` or ``triton``.

    Returns:
        ``[..., R]`` in the type of ``values``, summed in float32 or wider.
    """
    if slot_idx.shape != weights.shape:
        raise MidusError(
            f"slot_idx has shape {tuple(slot_idx.shape)} and weights {tuple(weights.shape)}; "
            "every selected row needs one weight"
        )
    if not takes_kernels(backend, values, weights):
        return _weighted_gather.weighted_gather(values, slot_idx, weights)
    out: Tensor = torch.ops.midus.weighted_gather(values, slot_idx, weights)
    return out


def headwise_memory(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    latent_values: Tensor,
    value_proj: Tensor,
    top_k: int,
    backend: Backend = "auto",
    search: Search = "auto",
) -> Tensor:
    """The whole head-wise memory layer: Top-k, softmax, weighted sum, projection (paper, Eq. 5).

    Selection is always in float32 or wider. Under autocast the table and the projections are cast
    to its type, as for any matrix product; queries and keys are taken as they are.

    Args:
        queries: ``[..., H, E]``.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        latent_values: ``[n * n, R]``, shared by the heads.
        value_proj: ``[H, R, O]``.
        top_k: Slots to read per head and query, at most n.
        backend: ``auto``, ``reference`` or ``triton``.
        search: ``two_stage``, ``cartesian``, or ``auto`` by size.

    Returns:
        ``[..., H, O]`` in the type of the values.
    """
    _check_keys(queries, row_keys, col_keys, top_k)
    num_heads, num_subkeys, _ = row_keys.shape
    if value_proj.dim() != 3 or value_proj.shape[0] != num_heads:
        raise MidusError(
            f"value_proj has shape {tuple(value_proj.shape)}, expected [{num_heads}, R, O]"
        )
    check_shape("latent_values", latent_values, (num_subkeys**2, value_proj.shape[1]))
    latent_values, value_proj = _one_type(latent_values, value_proj)
    inputs = (queries, row_keys, col_keys, latent_values, value_proj)
    use_triton = takes_kernels(backend, *inputs) and _fits_kernels(
        backend, row_keys.shape[1], top_k
    )
    cartesian = _use_cartesian(search, queries, row_keys, use_triton)
    if not use_triton:
        return _headwise_memory.headwise_memory(*inputs, top_k, cartesian)
    args = (*inputs, top_k, cartesian)
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    out: Tensor
    if torch.compiler.is_compiling() or type(queries) is not Tensor:
        out = torch.ops.midus.headwise_memory(*args, save)[0]
    elif save:
        out = _headwise_memory_library.HeadwiseMemory.apply(*args)  # type: ignore[no-untyped-call]
    else:
        out = _headwise_memory_library.run_forward(*args, False)[0]
    return out


def headwise_memory_cached(
    queries: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    backend: Backend = "auto",
    search: Search = "auto",
) -> Tensor:
    """``headwise_memory`` for inference, from values every head has projected already.

    Args:
        queries: ``[..., H, E]``.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        value_cache: ``[H, n * n, O]``, ``latent_values @ value_proj[h]`` for each head.
        top_k: Slots to read per head and query, at most n.
        backend: ``auto``, ``reference`` or ``triton``.
        search: ``two_stage``, ``cartesian``, or ``auto`` by size.

    Returns:
        ``[..., H, O]`` in the type of the cache. The kernels have no gradient.
    """
    _check_keys(queries, row_keys, col_keys, top_k)
    num_heads, num_subkeys, _ = row_keys.shape
    check_shape("value_cache", value_cache, (num_heads, num_subkeys**2, value_cache.shape[-1]))
    use_triton = takes_kernels(backend, queries, row_keys, col_keys, value_cache) and _fits_kernels(
        backend, row_keys.shape[1], top_k
    )
    cartesian = _use_cartesian(search, queries, row_keys, use_triton)
    inputs = (row_keys, col_keys, value_cache, top_k, cartesian)
    if not use_triton:
        return _headwise_memory.headwise_memory_cached(queries, *inputs)
    is_plain = type(queries) is Tensor and not torch.is_grad_enabled()
    if is_plain and not torch.compiler.is_compiling():
        return _headwise_memory_library.run_cached(queries, *inputs)
    out: Tensor = torch.ops.midus.headwise_memory_cached(queries, *inputs)
    return out


def attend_and_read(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int | Tensor,
    mask: Tensor | None,
    scale: float,
    hidden: Tensor,
    row_keys: Tensor,
    col_keys: Tensor,
    value_cache: Tensor,
    top_k: int,
    past: tuple[Tensor, Tensor] | None = None,
    backend: Backend = "auto",
    search: Search = "auto",
) -> Tensor:
    """``attend_token``, then ``headwise_memory_cached``, then the residual; no gradient.

    Args:
        queries: ``[B, H, E]``; this and what follows up to ``scale`` as in ``attend_token``.
        keys: ``[B, V, L, E]``.
        values: ``[B, V, L, E]``.
        length: Slots in use; as an integer on the device it is counted up.
        mask: ``[B, L]`` booleans, or None.
        scale: Factor of the scores.
        hidden: ``[B, H * O]`` or ``[B, 1, H * O]``, the residual stream.
        row_keys: ``[H, n, E/2]``.
        col_keys: ``[H, n, E/2]``.
        value_cache: ``[H, n * n, O]``.
        top_k: Slots to read per head.
        past: Contiguous keys and values ``[B, V, L - 1, E]`` to copy into the slots before the last
            of ``keys`` and ``values``, of which that one alone is filled; ``length`` is L.
        backend: ``auto``, ``reference`` or ``triton``.
        search: ``two_stage``, ``cartesian``, or ``auto``: two stages.

    Returns:
        In the shape of ``hidden``.
    """
    _check_keys(queries, row_keys, col_keys, top_k)
    if past is not None:
        _check_past(keys, values, length, *past)
    batch, (num_heads, _, head_width) = queries.shape[0], value_cache.shape
    if hidden.numel() != batch * num_heads * head_width:
        raise MidusError(
            f"hidden has shape {tuple(hidden.shape)}; expected one token a sequence, "
            f"{(batch, num_heads * head_width)}"
        )
    inputs = (queries, keys, values, hidden, row_keys, col_keys, value_cache)
    use_triton = takes_kernels(backend, *inputs) and _fits_kernels(
        backend, row_keys.shape[1], top_k
    )
    # Here a program has one token whatever the search, and two stages are the faster.
    cartesian = search != "auto" and _use_cartesian(search, queries, row_keys, use_triton)
    # Imported from the module itself, not from its package, which takes longer at every call.
    if use_triton:
        from midus.ops.token_step.memory_kernels import attend_and_read as run
    else:
        from midus.ops.token_step.reference import attend_and_read as run
    return run(
        queries,
        keys,
        values,
        length,
        mask,
        scale,
        hidden,
        row_keys,
        col_keys,
        value_cache,
        top_k,
        cartesian,
        past,
    )


def _check_keys(queries: Tensor, row_keys: Tensor, col_keys: Tensor, top_k: int) -> None:
    if queries.dim() < 2 or row_keys.dim() != 3:
        raise MidusError(
            f"queries have shape {tuple(queries.shape)} and row_keys {tuple(row_keys.shape)}; "
            "expected [..., H, E] and [H, n, E/2]"
        )
    *_, num_heads, width = queries.shape
    num_subkeys = row_keys.shape[1]
    shape = (num_heads, num_subkeys, width // 2)
    check_shape("row_keys", row_keys, shape)
    check_shape("col_keys", col_keys, shape)
    if width % 2:
        raise MidusError(f"queries are {width} wide; product keys need an even width")
    if not 1 <= top_k <= num_subkeys:
        raise MidusError(
            f"top_k={top_k} is not between 1 and the {num_subkeys} sub-keys; lower top_k or use "
            "more sub-keys"
        )


def _check_past(
    keys: Tensor, values: Tensor, length: int | Tensor, past_keys: Tensor, past_values: Tensor
) -> None:
    batch, num_kv_heads, num_slots, width = keys.shape
    before = (batch, num_kv_heads, num_slots - 1, width)
    if not (
        past_keys.shape == past_values.shape == before
        and past_keys.dtype == past_values.dtype == keys.dtype
        and past_keys.is_contiguous()
        and past_values.is_contiguous()
    ):
        raise MidusError(
            f"past has {tuple(past_keys.shape)} {past_keys.dtype} and {tuple(past_values.shape)} "
            f"{past_values.dtype}; expected {before} {keys.dtype}, contiguous, for both"
        )
    check_shape("values", values, keys.shape)
    if type(length) is not int or length != num_slots:
        raise MidusError(f"length={length} is not the {num_slots} slots of keys, as past needs it")


def _fits_kernels(backend: str, num_subkeys: int, top_k: int) -> bool:
    """Whether one program's registers hold a search of this size."""
    if num_subkeys <= _MAX_SUBKEYS and top_k <= _MAX_TOP_K:
        return True
    if backend == "triton":
        raise MidusError(
            f"backend='triton' got {num_subkeys} sub-keys and top_k={top_k}; the kernels search up "
            f"to {_MAX_SUBKEYS} for up to {_MAX_TOP_K}, use backend='reference'"
        )
    return False


def _use_cartesian(search: str, queries: Tensor, row_keys: Tensor, use_triton: bool) -> bool:
    if search not in ("auto", "two_stage", "cartesian"):
        raise MidusError(f"search={search!r} is unknown; choose auto, two_stage or cartesian")
    num_subkeys = row_keys.shape[1]
    if search == "cartesian" and use_triton and num_subkeys > _MAX_GRID:
        raise MidusError(
            f"search='cartesian' got {num_subkeys} sub-keys, and kernels hold a grid of at most "
            f"{_MAX_GRID} a side; use search='two_stage'"
        )
    if search != "auto" or not use_triton or num_subkeys > _CARTESIAN_SUBKEYS:
        return search == "cartesian"
    return queries.shape[:-2].numel() <= _CARTESIAN_TOKENS


def _one_type(latent_values: Tensor, value_proj: Tensor) -> tuple[Tensor, Tensor]:
    device = latent_values.device.type
    if torch.is_autocast_enabled(device) and latent_values.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    else:
        if latent_values.dtype == value_proj.dtype:
            return latent_values, value_proj
        dtype = torch.promote_types(latent_values.dtype, value_proj.dtype)
    return latent_values.to(dtype), value_proj.to(dtype)

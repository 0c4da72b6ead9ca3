"""Predictions beside measurements: the rows of `midus bench efficiency`, column by column."""

from collections.abc import Iterator
from typing import Any

from midus.efficiency.cost_model import predict_training
from midus.efficiency.cost_serving import predict_serving, prefill_work
from midus.efficiency.cost_sizes import Stack, read_stack
from midus.efficiency.cost_time import total_seconds
from midus.efficiency.cost_training import Run
from midus.efficiency.gpus import Gpu, Shares
from midus.efficiency.subjects import Subject
from midus.errors import MidusError
from midus.models.shapes import shape_config
from midus.upscaling.methods import find_method

# The shares are fitted to these rows of this shape, so they are no test of the times.
FITTED_SHAPE = "llama-3.1-8b"
FITTED_METHODS = ("base", "llama_pro")
_TIMES = ("train_s_per_iter", "decode_compiled_tok_s", "prefill_ms")
_PRECISIONS = {"bfloat16": "bf16", "float32": "float32"}


def run_of(protocol: dict[str, Any]) -> Run:
    """How a result's rows were trained."""
    dtype = protocol.get("dtype", "bfloat16")
    if dtype not in _PRECISIONS:
        raise MidusError(f"dtype={dtype!r} was measured, and there is no prediction for it")
    return Run(
        sequence=protocol["sequence"],
        micro_batch=protocol["micro_batch"],
        accumulation=protocol["accumulation"],
        precision=_PRECISIONS[dtype],  # type: ignore[arg-type]  # one of them
    )


def stack_of(row: dict[str, Any], shape: str) -> Stack:
    """The model of a measured row."""
    own = find_method(row["method"]).default_placement
    placement = None if row["placement"] == own else row["placement"]
    subject = Subject(method=row["method"], memory=row["memory"], placement=placement)
    return read_stack(subject.grown_config(shape_config(shape)))


def predict_row(
    stack: Stack, protocol: dict[str, Any], prompts: list[int], gpu: Gpu, shares: Shares
) -> dict[str, Any]:
    """The columns of a row as predicted.

    Args:
        stack: The model.
        protocol: How the row was measured.
        prompts: Prompt lengths of its prefill.
        gpu: The GPU.
        shares: How much of its data sheet it gives.
    """
    training = predict_training(stack, gpu, run_of(protocol), shares)
    tokens, repeats = protocol.get("decode_tokens", 64), protocol.get("repeats", 3)
    filled = protocol.get("decode_prompt", 128) + tokens * repeats // 2
    prompt = protocol.get("memory_prompt", 2048)
    decoding = predict_serving(stack, gpu, shares, filled, 1)
    generating = predict_serving(stack, gpu, shares, prompt + tokens, 1)
    return {
        "params_trainable": stack.params_trainable,
        "params_total": stack.params_total,
        "train_gb": training.memory.total / 1e9,
        "train_s_per_iter": training.seconds,
        "infer_gb": generating.total / 1e9,
        "decode_compiled_tok_s": decoding.decode_tokens_s,
        "prefill_ms": {
            str(length): total_seconds(prefill_work(stack, length), gpu, shares) * 1e3
            for length in prompts
        },
    }


def compare_rows(
    result: dict[str, Any], shape: str, gpu: Gpu, shares: Shares
) -> Iterator[dict[str, Any]]:
    """Every measured value of a result with its prediction, one at a time."""
    for row in result["rows"]:
        lengths = [int(length) for length, ms in row["prefill_ms"].items() if ms is not None]
        predicted = predict_row(stack_of(row, shape), result["protocol"], lengths, gpu, shares)
        is_fitted_row = shape == FITTED_SHAPE and row["method"] in FITTED_METHODS
        for column, value in predicted.items():
            pairs = value.items() if isinstance(value, dict) else [(None, value)]
            for prompt, guess in pairs:
                measured = row[column][prompt] if prompt else row[column]
                if measured is None:
                    continue
                yield {
                    "shape": shape,
                    "label": row["label"],
                    "column": column,
                    "prompt": prompt and int(prompt),
                    "measured": measured,
                    "predicted": guess,
                    "error_percent": 100 * (guess / measured - 1),
                    "is_fitted": is_fitted_row and column in _TIMES,
                }

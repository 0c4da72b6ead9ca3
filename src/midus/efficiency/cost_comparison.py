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

LARGE, SMALL = "llama-3.1-8b", "llama-3.2-1b"
LONG_PROMPT = 2048
"""Shorter prompts are bound by the host, which the fit of products leaves out."""

# Values that `SHARES` were fitted to, and which are therefore no test of it: by column and shape,
# the methods; of prefill, prompts of at least LONG_PROMPT tokens. With them go second measurements
# of the same network: without training, OpT-DeUS is Llama Pro's, and placement does not matter.
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "train_gb": {},
    "train_s_per_iter": {LARGE: ("base", "llama_pro")},
    "infer_gb": {},
    "decode_compiled_tok_s": {
        LARGE: (
            "base",
            "llama_pro",
            "opt_deus",
            "midus:hml",
            "midus:hml@top_heavy",
            "midus:pkm",
            "midus:linear",
            "midus:ultramem",
        ),
        SMALL: ("base", "llama_pro", "opt_deus"),
    },
    "prefill_ms": {LARGE: ("base", "llama_pro", "opt_deus", "midus:linear", "midus:ultramem")},
}

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
        fused_blocks=protocol.get("fused_blocks", False),
        cuda_graphs=protocol.get("cuda_graphs", False),
    )


def name_of(row: dict[str, Any]) -> str:
    """A row as `midus plan` would be asked for it: ``method[:memory][@placement]``."""
    name = row["method"] + (f":{row['memory']}" if row["memory"] else "")
    own = Subject(method=row["method"], memory=row["memory"]).resolved_placement
    return f"{name}@{row['placement']}" if row["placement"] not in (own, None) else name


def stack_of(row: dict[str, Any], shape: str) -> Stack:
    """The model of a measured row."""
    subject = Subject(method=row["method"], memory=row["memory"], placement=row["placement"])
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
            str(length): total_seconds(prefill_work(stack, length), gpu, shares, shares.launch_us)
            * 1e3
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
                    "is_fitted": _is_used(shape, name_of(row), column, prompt),
                }


def _is_used(shape: str, name: str, column: str, prompt: str | None) -> bool:
    is_short = prompt is not None and int(prompt) < LONG_PROMPT
    return not is_short and name in USED.get(column, {}).get(shape, ())

"""The rows of a result, measured in the process of one model."""

from dataclasses import dataclass
from typing import Any

from midus.efficiency.gpu_memory import release
from midus.efficiency.hardware import hardware_name, pick_device
from midus.efficiency.processes import Send
from midus.efficiency.protocol import Protocol
from midus.efficiency.random_model import ATTENTION
from midus.efficiency.row_phases import RowPhases
from midus.efficiency.subjects import Subject
from midus.efficiency.training_step import prepare_training
from midus.models.shapes import shape_config
from midus.upscaling.inspect import target_config


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row to measure: a subject under a protocol."""

    subject: Subject
    protocol: Protocol
    labels: dict[str, Any]
    """Columns that tell it from other rows of the subject, such as its batch size."""
    hf_compiled: bool = False
    """Whether transformers' own compiled decoding is timed too; compiling takes a minute."""
    decode_batch: int = 0
    """Sequences decoded side by side; 0: the columns of the efficiency table instead."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The rows one process measures, in order; equal subjects in a row share a model."""

    target: str
    """Built-in shape, or checkpoint folder or hub id of the base."""
    is_shape: bool
    """Which of the two; a folder may have a shape's name."""
    points: tuple[Point, ...]


def empty_row(point: Point) -> dict[str, Any]:
    """The columns of a row before anything is measured."""
    return {
        **point.subject.names(),
        **point.labels,
        "params_trainable": None,
        "params_total": None,
        "train_gb": None,
        "infer_gb": None,
        "train_s_per_iter": None,
        "train_s_spread": None,
        "train_tokens_per_iter": None,
        "train_graphed": None,
        "decode_eager_tok_s": None,
        "decode_eager_spread": None,
        "decode_eager_runs": [],
        "decode_compiled_tok_s": None,
        "decode_compiled_spread": None,
        "decode_compiled_runs": [],
        "generate_fast_tok_s": None,
        "generate_fast_spread": None,
        "generate_fast_runs": [],
        "decode_hf_compiled_tok_s": None,
        "decode_hf_compiled_spread": None,
        "decode_hf_compiled_runs": [],
        "prefill_ms": {},
        "prefill_spread_ms": {},
        "prefill_gb": {},
        "kv_cache_bytes_per_token": None,
        "attn_implementation": ATTENTION,
        "optimizer": None,
        "dtype": point.protocol.dtype,
        "oom": [],
        "errors": {},
    }


def run_job(job: Job, send: Send) -> None:
    """Measures a job's rows; sends ``hardware``, then ``phase`` and ``rows`` as they come.

    Inference comes first, then the same model trains.

    Args:
        job: What to measure.
        send: Gets the kind of message and its content; rows are sent anew whenever they change.
    """
    device = pick_device(job.points[0].protocol.device)
    send("hardware", hardware_name(device))
    base_config = shape_config(job.target) if job.is_shape else target_config(job.target)
    longest = max(point.protocol.longest for point in job.points)
    rows: list[dict[str, Any]] = []
    model: Any = None
    made: Subject | None = None
    is_training = False
    for point in job.points:
        row = empty_row(point)
        rows.append(row)
        phases = RowPhases(row, point.subject, point.protocol, device, send, rows)
        if point.subject != made or (is_training and point.protocol.infers):
            model = made = None
            release(device)
            model = phases.build(base_config, longest)
            is_training = False
            if model is None:
                continue
            made = point.subject
        phases.count_parameters(model)
        if point.decode_batch:
            phases.decode(model, point.decode_batch)
            continue
        if point.protocol.infers:
            phases.infer(model, point.hf_compiled)
        if point.protocol.runs_phase("train"):
            if not is_training:
                prepare_training(model, point.protocol.fused_blocks)
                is_training = True
            phases.train(model)

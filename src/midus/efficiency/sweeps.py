"""Rows over one setting: the paper's batch and sequence figures, its placements, and more.

Paper, Appendix "Additional efficiency experiments" (batch, sequence) and the table of placement
policies; Top-k and the number of sub-keys are the memory's own sizes.
"""

from dataclasses import replace
from typing import Any

from midus.efficiency.protocol import Protocol, parse_numbers
from midus.efficiency.rows import Point
from midus.efficiency.subjects import Subject
from midus.errors import MidusError
from midus.upscaling.methods import find_method

OVER = ("batch", "sequence", "top_k", "num_subkeys", "placement")
_TOP_K = (1, 2, 4, 8, 16, 32)
_PLACEMENTS = "top_heavy,distributed,bottom_heavy"


def default_methods(over: str) -> str:
    """The methods of a sweep where none are named."""
    _check(over)
    if over in ("top_k", "num_subkeys"):
        return "midus:hml"
    if over == "placement":
        return "llama_pro,midus:hml"
    return "llama_pro,opt_deus,midus:hml,midus:hml@top_heavy"


def default_values(over: str, protocol: Protocol, subject: Subject) -> str:
    """The values of a method's sweep where none are given."""
    _check(over)
    steps = protocol.accumulation
    lengths = "512,1024,2048,4096" if protocol.device == "cuda" else "8,16,32"
    return {
        "batch": f"{steps},{2 * steps},{4 * steps}",
        "sequence": lengths,
        "top_k": ",".join(str(k) for k in _TOP_K if k <= subject.memory_config.num_subkeys),
        "num_subkeys": "16,32,64,128,256",
        "placement": _PLACEMENTS,
    }[over]


def sweep_points(subject: Subject, over: str, values: str, protocol: Protocol) -> tuple[Point, ...]:
    """The points of one method.

    Args:
        subject: The method.
        over: Which setting changes.
        values: Its values, with commas; empty: `default_values`.
        protocol: Everything else.
    """
    _check(over)
    values = values or default_values(over, protocol, subject)
    training = protocol.with_phases("train")
    if over == "placement":
        names = dict.fromkeys(_own_name(part.strip(), subject) for part in values.split(","))
        return tuple(
            _point(subject.changed(placement=name), training, over, name) for name in names
        )
    numbers = list(dict.fromkeys(parse_numbers("values", values)))
    if over == "sequence":
        return tuple(
            _point(subject, replace(training, sequence=number), over, number) for number in numbers
        )
    if over == "batch":
        steps = protocol.accumulation
        if uneven := [number for number in numbers if number % steps]:
            raise MidusError(
                f"values={values!r} has {uneven[0]}, which {steps} accumulation steps do not "
                "divide; give multiples of it or another --accumulation"
            )
        return tuple(
            _point(subject, replace(training, micro_batch=number // steps), over, number)
            for number in numbers
        )
    longer = replace(
        protocol.with_phases("prefill", "decode_compiled", "train"),
        prompts=(protocol.prompts[-1],),
    )
    return tuple(
        _point(subject.changed(**{over: number}), longer, over, number) for number in numbers
    )


def decode_points(
    subject: Subject, batches: list[int], contexts: list[int], protocol: Protocol
) -> tuple[Point, ...]:
    """Every batch size at every context length."""
    return tuple(
        Point(
            subject=subject,
            protocol=replace(protocol, decode_prompt=context, prompts=(context,)),
            labels={"batch": batch, "context": context},
            decode_batch=batch,
        )
        for context in contexts
        for batch in batches
    )


def _point(subject: Subject, protocol: Protocol, over: str, value: Any) -> Point:
    return Point(subject=subject, protocol=protocol, labels={"over": over, "value": value})


def _own_name(placement: str, subject: Subject) -> str:
    """The interleaved placement is called llama_pro where copies stand after their anchors."""
    own = find_method(subject.method).default_placement
    return "llama_pro" if placement == "distributed" and own == "llama_pro" else placement


def _check(over: str) -> None:
    if over not in OVER:
        raise MidusError(f"over={over!r} is unknown; choose one of {', '.join(OVER)}")

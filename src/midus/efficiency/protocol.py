"""How models are measured: lengths, batches, repeats, and which phases run.

The defaults on a GPU are the paper's (Appendix "Additional efficiency experiments"): sequences of
2,048 tokens, 16 of them an iteration, one at a time. On a CPU they are small, to try commands out.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from midus.errors import MidusError

PHASES = ("prefill", "decode_eager", "infer_gb", "decode_compiled", "generate_fast", "train")
# `decode` in --skip stands for everything that generates.
_GENERATING = ("decode_eager", "decode_hf_compiled", "infer_gb", "decode_compiled", "generate_fast")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way to measure, the same for every row of a result."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    """Of weights, gradients, optimizer states and arithmetic alike."""
    repeats: int = 3
    """Timed iterations of training, and timed runs of decoding."""
    sequence: int = 2048
    """Tokens of a training sequence."""
    micro_batch: int = 1
    """Sequences of one forward and backward pass."""
    accumulation: int = 16
    """Passes of one iteration, after which the optimizer steps."""
    train_warmup: int = 1
    """Iterations before the timed ones; the first makes the optimizer's states."""
    prompts: tuple[int, ...] = (128, 512, 2048, 8192)
    """Prompt lengths of prefill."""
    prefill_warmup: int = 5
    """Runs of a prompt before the timed ones; one of a prompt of 16,384 tokens or more."""
    prefill_runs: int = 5
    """Timed runs of a prompt under 16,384 tokens; 3 of a longer one."""
    decode_prompt: int = 128
    decode_tokens: int = 64
    """Tokens that are timed."""
    decode_warmup: int = 8
    """Replayed steps before the timed ones."""
    memory_prompt: int = 2048
    """Prompt whose generation's peak memory is infer_gb."""
    fused_blocks: bool = True
    """Whether blocks of the base train with our kernels, as `midus train` has it."""
    cuda_graphs: bool = True
    """Whether a micro batch's step is captured and replayed, as `midus train` does on a GPU."""
    skip: tuple[str, ...] = ()
    """Phases that do not run."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.dtype not in DTYPES:
            raise MidusError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
        for name in ("repeats", "sequence", "micro_batch", "accumulation", "decode_tokens"):
            smallest = 2 if name == "sequence" else 1
            if getattr(self, name) < smallest:
                raise MidusError(f"{name}={getattr(self, name)} must be at least {smallest}")

    @property
    def longest(self) -> int:
        """The most positions any phase needs."""
        steps = self.decode_warmup + (self.repeats + 1) * self.decode_tokens
        decoded = max(self.decode_prompt, self.memory_prompt) + steps + 2
        return max(self.sequence, *self.prompts, decoded)

    def runs_phase(self, phase: str) -> bool:
        return phase not in self.skip

    @property
    def infers(self) -> bool:
        """Whether anything but training runs."""
        return any(self.runs_phase(phase) for phase in PHASES if phase != "train")

    def with_phases(self, *phases: str) -> "Protocol":
        """The same with these phases only."""
        return replace(self, skip=tuple(phase for phase in PHASES if phase not in phases))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# There are no CUDA graphs, and nothing counts the memory.
_NOT_ON_CPU = ("infer_gb", "generate_fast")
_ON_CPU: dict[str, Any] = {
    "sequence": 32,
    "accumulation": 2,
    "prompts": (8, 32),
    "prefill_warmup": 1,
    "prefill_runs": 3,
    "decode_prompt": 8,
    "decode_tokens": 8,
    "decode_warmup": 2,
    "memory_prompt": 8,
}


def make_protocol(device: str, **values: Any) -> Protocol:
    """The device's defaults with the values that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    if device == "cpu":
        given = {**_ON_CPU, **given, "skip": (*given.get("skip", ()), *_NOT_ON_CPU)}
    return Protocol(device=device, **given)


def parse_numbers(name: str, text: str) -> list[int]:
    """Positive whole numbers from a list with commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise MidusError(f"{name}={text!r} is no list of positive whole numbers such as 1,128")
    return numbers


def parse_skip(text: str) -> tuple[str, ...]:
    """The phases that a list with commas leaves out."""
    skipped: list[str] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        if part == "decode":
            skipped += _GENERATING
        elif part in (*PHASES, *_GENERATING):
            skipped.append(part)
        else:
            known = ", ".join((*PHASES, "decode"))
            raise MidusError(f"skip={part!r} is no phase; choose from {known}")
    return tuple(dict.fromkeys(skipped))

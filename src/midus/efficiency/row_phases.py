"""The phases of one row: building, prefill, decoding, training.

A phase that runs out of memory or fails leaves its columns empty and its name behind.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from midus.efficiency import inference, training_step
from midus.efficiency.gpu_memory import peak_gb, release, start_peak
from midus.efficiency.inference import Rate
from midus.efficiency.processes import Send
from midus.efficiency.protocol import Protocol
from midus.efficiency.random_model import make_random_model
from midus.efficiency.subjects import Subject
from midus.models.record import set_trainable

# How other parts of CUDA say it: cuBLAS handles and captured graphs have errors of their own.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class RowPhases:
    """Fills one row.

    Args:
        row: The row.
        subject: What is measured.
        protocol: How.
        device: Where.
        send: Tells the parent the phase, and the rows after it.
        rows: All rows so far, this one last.
    """

    def __init__(
        self,
        row: dict[str, Any],
        subject: Subject,
        protocol: Protocol,
        device: torch.device,
        send: Send,
        rows: list[dict[str, Any]],
    ) -> None:
        self.row = row
        self.subject = subject
        self.protocol = protocol
        self.device = device
        self._send = send
        self._rows = rows

    def build(self, base_config: Any, longest: int) -> Any:
        """A random model of the subject, or None."""
        made: list[Any] = []

        def build() -> None:
            config = self.subject.grown_config(base_config)
            dtype = getattr(torch, self.protocol.dtype)
            made.append(make_random_model(config, self.device, dtype, longest))

        self._run("build", build)
        return made.pop() if made else None

    def count_parameters(self, model: Any) -> None:
        """Freezes what the method freezes, and counts."""
        set_trainable(model)
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]  # tied ones come once
        self.row["params_total"] = sum(size for size, _ in sizes)
        self.row["params_trainable"] = sum(size for size, trains in sizes if trains)
        self._send("rows", self._rows)

    def infer(self, model: Any, hf_compiled: bool = False) -> None:
        """The paper's inference columns, and what generation costs compiled."""
        protocol, device = self.protocol, self.device
        tokens, repeats = protocol.decode_tokens, protocol.repeats
        self._run("prepare", partial(inference.prepare_inference, model))
        prompts = protocol.prompts if protocol.runs_phase("prefill") else ()
        if prompts:  # what is made at first calls, and clocks, are the first length's no more
            self._run("warm-up", partial(inference.warm_up, model, max(prompts), device))
        for prompt in prompts:
            self._run(f"prefill {prompt}", partial(self._prefill, model, prompt))
        input_ids = inference.random_prompt(model, 1, protocol.decode_prompt, device)

        def cache_size() -> int:
            length = protocol.decode_prompt
            return inference.kv_cache_bytes(model, length, device) // length

        def eager() -> Rate:
            return inference.measure_generate(model.generate, input_ids, tokens, repeats, device)

        def memory() -> float | None:
            return inference.measure_generation_memory(
                model, protocol.memory_prompt, tokens, device
            )

        def compiled() -> Rate:
            return inference.measure_decoder(
                model, input_ids, tokens, repeats, protocol.decode_warmup, device
            )

        def fast() -> Rate:
            from midus.models.fast import generate_fast

            with warnings.catch_warnings():
                # It would go on with plain generation, which is another column.
                warnings.filterwarnings("error", message="generating without CUDA graphs")
                return inference.measure_generate(
                    partial(generate_fast, model), input_ids, tokens, repeats, device
                )

        def hugging_face() -> Rate:
            return inference.measure_hf_compiled(
                model, input_ids, tokens, repeats, protocol.decode_warmup, device
            )

        self._fill("kv_cache", "kv_cache_bytes_per_token", cache_size)
        self._fill("decode_eager", "decode_eager_tok_s", eager)
        if hf_compiled:
            self._fill("decode_hf_compiled", "decode_hf_compiled_tok_s", hugging_face)
        self._fill("infer_gb", "infer_gb", memory)
        self._fill("decode_compiled", "decode_compiled_tok_s", compiled)
        self._fill("generate_fast", "generate_fast_tok_s", fast)
        inference.finish_inference(model)

    def decode(self, model: Any, batch: int) -> None:
        """Eager and compiled decoding of several sequences whose cache is filled by prefill."""
        protocol, device = self.protocol, self.device
        context = protocol.decode_prompt
        tokens, repeats = protocol.decode_tokens, protocol.repeats
        self.row.update(kv_cache_bytes=None, eager_gb=None, compiled_gb=None)
        self._run("prepare", partial(inference.prepare_inference, model))

        def cache_size() -> int:
            one = inference.kv_cache_bytes(model, context, device)
            self.row["kv_cache_bytes_per_token"] = one // context
            return batch * one

        def eager() -> Rate:
            start_peak(device)
            input_ids = inference.random_prompt(model, batch, context, device)
            rate = inference.measure_generate(model.generate, input_ids, tokens, repeats, device)
            self.row["eager_gb"] = peak_gb(device)
            return rate

        def compiled() -> Rate:
            start_peak(device)
            input_ids = inference.random_prompt(model, batch, context, device)
            rate = inference.measure_decoder(
                model, input_ids, tokens, repeats, protocol.decode_warmup, device
            )
            self.row["compiled_gb"] = peak_gb(device)
            return rate

        self._fill("kv_cache", "kv_cache_bytes", cache_size)
        self._fill("decode_eager", "decode_eager_tok_s", eager)
        self._fill("decode_compiled", "decode_compiled_tok_s", compiled)
        inference.finish_inference(model)

    def train(self, model: Any) -> None:
        """The paper's training columns."""
        protocol = self.protocol
        self.row["optimizer"] = training_step.optimizer_name(self.device, protocol.dtype)

        def train() -> None:
            self.row.update(
                training_step.measure_training(
                    model,
                    self.device,
                    sequence=protocol.sequence,
                    micro_batch=protocol.micro_batch,
                    accumulation=protocol.accumulation,
                    repeats=protocol.repeats,
                    warmup=protocol.train_warmup,
                    cuda_graphs=protocol.cuda_graphs,
                )
            )

        self._run("train", train)

    def _prefill(self, model: Any, prompt: int) -> None:
        measured = inference.measure_prefill(
            model, prompt, self.device, self.protocol.prefill_warmup, self.protocol.prefill_runs
        )
        for column, value in measured.items():
            self.row[f"prefill_{column}"][str(prompt)] = value

    def _fill(self, phase: str, column: str, measure: Callable[[], Any]) -> None:
        def fill() -> None:
            measured = measure()
            if isinstance(measured, Rate):
                self.row[column.replace("_tok_s", "_spread")] = measured.spread
                self.row[column.replace("_tok_s", "_runs")] = measured.runs
                measured = measured.median
            self.row[column] = measured

        if self.protocol.runs_phase(phase):
            self._run(phase, fill)

    def _run(self, phase: str, function: Callable[[], None]) -> None:
        self._send("phase", f"{self.subject.label}: {phase}")
        run_phase(self.row, phase, function, self.device)
        self._send("rows", self._rows)


def run_phase(
    row: dict[str, Any], name: str, function: Callable[[], Any], device: torch.device
) -> bool:
    """Runs one phase of a row; running out of memory and failing are results.

    Args:
        row: Gets the phase's name in ``oom``, or the first line of its error in ``errors``.
        name: Of the phase.
        function: Puts its results into the row itself.
        device: Freed afterwards.

    Returns:
        Whether it came through.
    """
    try:
        function()
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        if isinstance(error, torch.OutOfMemoryError) or any(s in text for s in _OUT_OF_MEMORY):
            row["oom"].append(name)
        else:
            row["errors"][name] = f"{type(error).__name__}: {text.splitlines()[0]}"
        # The frames hold the tensors of what failed.
        error.__traceback__ = None
        return False
    finally:
        release(device)
    return True

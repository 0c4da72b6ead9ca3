"""Requests as token files: rendered where the harness is, scored where only torch is.

The harness asks a model three things: the log-likelihood of a continuation, that of a whole text
by rolling windows, and a greedy continuation. `render` runs the harness with a model that writes
down what it is asked, tokens and all; `midus.evaluation.scoring` answers on any machine; and
`aggregate` runs the harness again with a model that reads the answers. Prompts, windows, filters
and metrics are thus the harness's own, both times.
"""

import gzip
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from midus.errors import MidusError
from midus.evaluation.harness import HarnessTask, TaskResult, run_task
from midus.evaluation.scoring import RENDER_NAME, read_scores, requests_path, tokenizer_digest
from midus.reports import write_json


def render(
    tokenizer: Any,
    max_length: int,
    tasks: list[HarnessTask],
    folder: Path,
    limit: int | None,
    facts: dict[str, Any],
) -> dict[str, int]:
    """Writes the requests of every task; returns how many each has.

    Args:
        tokenizer: Of the model that will be scored.
        max_length: Tokens a forward pass may see.
        tasks: What to ask.
        folder: Where to write.
        limit: Documents of each task; None: all.
        facts: What `aggregate` needs to find the same tasks again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    counts, digests, requests = {}, {}, {}
    for task in tasks:
        recorder = _silent_lm(tokenizer, max_length)
        run_task(recorder, task, limit)
        counts[task.name] = recorder.count
        digests[task.name] = recorder.asked.hexdigest()
        requests[task.name] = hashlib.sha256(json.dumps(recorder.lines).encode()).hexdigest()
        _write_lines(requests_path(folder, task.name), recorder.lines)
    found = {
        "counts": counts,
        "digests": digests,
        "requests": requests,
        "tokenizer": tokenizer_digest(tokenizer),
    }
    write_json(folder / RENDER_NAME, {"kind": "midus.eval.render", **found, **facts})
    return counts


def aggregate(
    tokenizer: Any, rendered: dict[str, Any], task: HarnessTask, scores: Path
) -> TaskResult:
    """What one task comes to, from the answers a scored model gave.

    Args:
        tokenizer: The one that was rendered with.
        rendered: The facts of the rendering.
        task: The task, with the documents it had then.
        scores: Folder of one model's answers.
    """
    lm = _silent_lm(tokenizer, rendered["max_length"])
    lm.answers = read_scores(scores, task.name, rendered["counts"][task.name])
    result = run_task(lm, task, rendered["limit"])
    if lm.asked.hexdigest() != rendered["digests"][task.name]:
        raise MidusError(
            f"task {task.name!r} asks other questions than were rendered; use the data and the "
            "lm_eval it was rendered with, or render it again"
        )
    return result


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    aside = path.with_name(f".{path.name}")
    # No time stamp and no name, so that the same requests are the same bytes.
    with aside.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    aside.replace(path)


def _silent_lm(tokenizer: Any, max_length: int) -> Any:
    """A model of the harness that writes down its requests and answers from a list, or nothing."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    class SilentLM(HFLM):  # type: ignore[misc]  # the harness is untyped
        """The harness's own model class, stopped before it would run the model."""

        def __init__(self) -> None:
            config = SimpleNamespace(model_type="llama")
            nobody = SimpleNamespace(config=config, device=torch.device("cpu"))
            super().__init__(
                pretrained=nobody,
                tokenizer=tokenizer,
                backend="causal",
                batch_size=1_000_000,
                max_length=max_length,
            )
            self.lines: list[dict[str, Any]] = []
            self.count = 0
            self.asked = hashlib.sha256()
            self.answers: list[Any] | None = None

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self._note(requests)
            if self.answers is None:
                return super().loglikelihood(requests, disable_tqdm=True)
            return self._next(len(requests))  # one answer a request: nothing to encode

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self._note(requests)
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[Any]:
            if self.answers is not None:
                return self._next(len(requests))
            for _, context, continuation in requests:
                kept = (context + continuation)[-(max_length + 1) :]
                if len(continuation) >= len(kept):
                    raise MidusError(
                        f"a continuation of {len(continuation)} tokens leaves no context within "
                        f"max_length={max_length}; raise --max-length"
                    )
                context = kept[: -len(continuation)]
                last = self.lines[-1] if self.lines else {}
                if last.get("context") == context and "continuations" in last:
                    last["continuations"].append(continuation)
                else:
                    line = {"first": self.count, "context": context}
                    self.lines.append({**line, "continuations": [continuation]})
                self.count += 1
            return [(-1.0, False)] * len(requests)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[Any]:
            self._note(requests)
            if self.answers is not None:
                return self._next(len(requests))
            eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
            for request in requests:
                text, given = request.args
                options = normalize_gen_kwargs(given, self.max_gen_toks)
                if options.pop("do_sample", False):
                    raise MidusError(
                        f"task {request.task_name!r} samples its answers; only greedy ones can be "
                        "scored apart, so run it directly"
                    )
                until = handle_stop_sequences(options.pop("until", None), eos=eos)
                new = options.pop("max_gen_toks")
                if max_length <= new:
                    raise MidusError(
                        f"task {request.task_name!r} writes up to {new} tokens, and "
                        f"max_length={max_length} leaves no room before them; raise --max-length"
                    )
                ids, _ = self.tok_batch_encode([text], left_truncate_len=max_length - new)
                line = {"first": self.count, "context": ids[0].tolist()}
                self.lines.append({**line, "until": until, "max_new_tokens": new})
                self.count += 1
            return [""] * len(requests)

        def _note(self, requests: Any) -> None:
            for request in requests:
                self.asked.update(json.dumps(request.args).encode())

        def _next(self, number: int) -> list[Any]:
            assert self.answers is not None
            first, self.count = self.count, self.count + number
            return self.answers[first : self.count]

    return SilentLM()

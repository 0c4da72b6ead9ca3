"""Answers rendered requests with torch and transformers alone: no harness, no datasets, no network.

Every process takes its share of the requests and appends what it has to a file of its own, so a
killed run goes on, and `torchrun` on any number of GPUs needs no communication.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from midus.errors import MidusError
from midus.evaluation.rows import Row, in_batches, log_likelihoods, make_rows
from midus.evaluation.verify import Track
from midus.reports import conditions, write_json

RENDER_NAME = "render.json"
SCORES_NAME = "scores.json"


@dataclass(frozen=True)
class Share:
    """Which of the requests this process answers."""

    rank: int
    num_processes: int

    @classmethod
    def from_environment(cls) -> "Share":
        """As `torchrun` says it."""
        rank, num = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return cls(rank, num)


def requests_path(folder: Path, task: str) -> Path:
    """The file of one task's requests."""
    return folder / f"{task}.jsonl.gz"


def rendered_tokenizer(folder: Path) -> Any:
    """The tokenizer that requests were rendered with."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tokenizer")


def read_render(folder: Path) -> dict[str, Any]:
    """What a rendering says of itself."""
    path = folder / RENDER_NAME
    if not path.is_file():
        raise MidusError(f"{folder} has no {RENDER_NAME}; give a folder that `eval render` wrote")
    facts = _read_object(path, "render it again")
    if facts.get("kind") != "midus.eval.render":
        raise MidusError(f"{path} is none that `midus eval render` wrote; render it again")
    return facts


def read_meta(folder: Path) -> dict[str, Any]:
    """What a folder of scores says of itself."""
    return _read_object(folder / SCORES_NAME, "score into another folder")


def _read_object(path: Path, advice: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MidusError(f"{path} cannot be read ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise MidusError(f"{path} holds a {type(value).__name__}, not an object; {advice}")
    return value


def tokenizer_digest(tokenizer: Any) -> str:
    """Tells tokenizers apart: vocabulary, special tokens, and how a line of text is cut."""
    sample = tokenizer("Naïve 1,234 + 5.6 = ?\n\tdef f(x): return 'x'  # ok").input_ids
    facts = [sorted(tokenizer.get_vocab().items()), sample]
    facts += [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def open_scores(folder: Path, facts: dict[str, Any]) -> None:
    """Begins or continues a folder of scores, and refuses one of another model or rendering."""
    path = folder / SCORES_NAME
    if path.is_file():
        there = read_meta(folder)
        for name in ("model_id", "dtype", "requests"):
            if there.get(name) != facts[name]:
                mine = "others" if name == "requests" else repr(facts[name])
                raise MidusError(
                    f"{folder} holds scores of {there.get('model')} whose {name} differ from this "
                    f"run's ({mine}); give another folder"
                )
        return
    write_json(path, {"kind": "midus.eval.scores", **facts, "conditions": conditions()})


def score_task(
    model: Any,
    tokenizer: Any,
    rendered: Path,
    task: str,
    scores: Path,
    *,
    share: Share,
    batch_tokens: int,
    track: Track = lambda items, _: items,
) -> int:
    """Answers one task's requests that have no answer yet; returns how many it answered.

    Args:
        model: On its device, in evaluation mode.
        tokenizer: For answers that are text.
        rendered: Folder that `render` wrote.
        task: Which task.
        scores: Folder of this model's answers.
        share: What of the work is this process's.
        batch_tokens: Tokens of a batch, padding included, and eight times as many where answers
            are written; a batch that memory does not hold is halved.
        track: Wraps the batches in a progress bar.
    """
    done = {entry["id"] for entry in _read_parts(scores, task)}
    rows = [row for line in _read_lines(rendered, task) for row in _rows(line)]
    # The longest first: if memory runs out, it does so at once.
    rows.sort(key=lambda row: -row.num_tokens)
    mine = [
        row
        for i, row in enumerate(rows)
        if i % share.num_processes == share.rank and not done.issuperset(row.ids)
    ]
    path = scores / f"{task}.{share.rank}-of-{share.num_processes}.jsonl"
    _drop_torn_line(path)
    with path.open("a") as file:
        for batch in track(list(in_batches(mine, batch_tokens)), task):
            for entry in _answer(model, tokenizer, batch):
                file.write(json.dumps(entry) + "\n")
            file.flush()
    return sum(len(row.ids) for row in mine)


def read_scores(folder: Path, task: str, count: int) -> list[Any]:
    """A task's answers in the order of its requests; all of them must be there."""
    answers: dict[int, Any] = {}
    for entry in _read_parts(folder, task):
        answers[entry["id"]] = entry["text"] if "text" in entry else (entry["sum"], entry["greedy"])
    missing = count - len(answers)
    if missing:
        raise MidusError(
            f"{missing} of the {count} requests of task {task!r} have no answer in {folder}; run "
            "`midus eval score` again, it goes on where it stopped"
        )
    return [answers[i] for i in range(count)]


def _rows(line: dict[str, Any]) -> list[Row]:
    context, first = line["context"], line["first"]
    if "until" in line:
        return [Row(context, [first], [], tuple(line["until"]), line["max_new_tokens"])]
    return make_rows(((context, each) for each in line["continuations"]), first)


@torch.inference_mode()
def _answer(model: Any, tokenizer: Any, batch: list[Row]) -> list[dict[str, Any]]:
    try:
        if batch[0].max_new_tokens:
            return _write_on(model, tokenizer, batch)
        return [
            {"id": request, "sum": value, "greedy": is_greedy}
            for request, value, is_greedy in log_likelihoods(model, batch)
        ]
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    torch.cuda.empty_cache()
    half = len(batch) // 2
    return _answer(model, tokenizer, batch[:half]) + _answer(model, tokenizer, batch[half:])


def _write_on(model: Any, tokenizer: Any, batch: list[Row]) -> list[dict[str, Any]]:
    from transformers import StoppingCriteriaList

    width = max(len(item.tokens) for item in batch)
    rows = torch.full((len(batch), width), tokenizer.pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(rows)
    for row, seen, item in zip(rows, mask, batch, strict=True):
        row[width - len(item.tokens) :] = torch.tensor(item.tokens)
        seen[width - len(item.tokens) :] = 1
    stop = _StopStrings(tokenizer, batch[0].until, width)
    written = model.generate(
        input_ids=rows.to(model.device),
        attention_mask=mask.to(model.device),
        max_length=width + batch[0].max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=tokenizer.pad_token_id,
        stopping_criteria=StoppingCriteriaList([stop]),
        use_cache=True,
    )
    entries = []
    for item, row in zip(batch, written[:, width:].tolist(), strict=True):
        text = tokenizer.decode(row, skip_special_tokens=True)
        for term in item.until:
            text = text.split(term)[0] if term else text
        entries.append({"id": item.ids[0], "text": text})
    return entries


class _StopStrings:
    """Says which rows have written one of their last words."""

    def __init__(self, tokenizer: Any, until: tuple[str, ...], prompt_width: int) -> None:
        self._tokenizer = tokenizer
        self._until = [term for term in until if term]
        # A token is a character at least, and a stop string may begin inside the first of them.
        self._tail = max((len(term) for term in self._until), default=0) + 2
        self._prompt_width = prompt_width
        self._done: Tensor | None = None

    def __call__(self, ids: Tensor, _: Any, **__: Any) -> Tensor:
        if self._done is None:
            self._done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        tails = ids[:, max(self._prompt_width, ids.shape[1] - self._tail) :]
        writing = (~self._done).nonzero()[:, 0]
        texts = self._tokenizer.batch_decode(tails[writing])
        said = [any(term in text for term in self._until) for text in texts]
        self._done[writing] = torch.tensor(said, device=ids.device)
        return self._done


def _read_lines(folder: Path, task: str) -> list[dict[str, Any]]:
    path = requests_path(folder, task)
    try:
        with gzip.open(path, "rt") as file:
            return [json.loads(line) for line in file]
    except (OSError, EOFError, ValueError) as error:
        raise MidusError(f"{path} cannot be read ({error}); render it again") from error


def _read_parts(folder: Path, task: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"{task}.*-of-*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            # A line that a kill or a full disk has torn is asked again.
            with suppress(ValueError):
                yield json.loads(line)


def _drop_torn_line(path: Path) -> None:
    """A process that was killed may have left half a line."""
    if path.is_file():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)

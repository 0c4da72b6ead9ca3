"""`read_instructions`: fine-tuning rows as TRL's SFTTrainer takes them, prompt and completion.

Plain rows become text in Alpaca's format; chat rows become messages for the tokenizer's chat
template. TRL trains on completions only, and adds the EOS token to a plain completion that does not
end with it, so the one added here stays the only one.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from midus.data.documents import content_hash, held_out_limit
from midus.data.options import DataOptions, SourceOptions
from midus.data.rows import (
    BadRows,
    Row,
    hub_revision,
    is_hub_dataset,
    list_files,
    read_hub_rows,
    read_rows,
    require,
)
from midus.errors import MidusError

# Stanford Alpaca's two prompts, word for word.
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_ROLES = ("system", "user", "assistant", "tool")


class _BadRow(Exception):
    """What is wrong with one row."""


@dataclass(frozen=True)
class PreparedRows:
    """What fine-tuning reads."""

    train: Any
    """A ``datasets.Dataset`` of ``prompt`` and ``completion``."""
    held_out: Any | None
    """The same of rows kept apart, or None where there are none."""
    num_rows: int
    """Usable rows, training and held out together."""
    bad_rows: int
    """Rows that could not be used."""
    bad_row_names: list[str]
    """Where the first bad rows stand and what is wrong with them."""
    identity: str
    """Stands for every row, in order."""


def read_instructions(options: DataOptions, tokenizer: Any) -> PreparedRows:
    """Reads all rows of the sources into prompts and completions.

    Args:
        options: Which rows, and in which form (``row_format``).
        tokenizer: The model's tokenizer, for its EOS token and chat template.
    """
    if len({source.weight for source in options.sources}) > 1:
        raise MidusError("weights mix texts, and rows are all used once; leave the weights out")
    bad = BadRows()
    train = _rows(options.sources, options.row_format, tokenizer, bad)
    held_out: list[dict[str, Any]] = []
    if options.eval_sources:
        held_out = _rows(options.eval_sources, options.row_format, tokenizer, bad)
    elif options.held_out:
        limit = held_out_limit(options.held_out)
        everything, train = train, []
        for row in everything:
            (held_out if _row_hash(row) < limit else train).append(row)
    names = [f"{where}: {reason}" for _, where, reason in bad.named]
    if not train:
        paths = ", ".join(source.path for source in options.sources)
        first = f"; the first bad row is {names[0]}" if names else ""
        raise MidusError(f"{paths} holds no usable rows ({bad.count:,} bad rows){first}")
    if len({isinstance(row["prompt"], str) for row in (*train, *held_out)}) > 1:
        raise MidusError(
            "the sources mix plain rows and chat rows; set row_format to chat, so that all of them "
            "become messages"
        )
    if not isinstance(train[0]["prompt"], str) and not getattr(tokenizer, "chat_template", None):
        raise MidusError(
            "the rows are chats and the tokenizer has no chat template; use the tokenizer of a "
            "chat model, or rows of plain text"
        )
    return PreparedRows(
        train=_dataset(train),
        held_out=_dataset(held_out) if held_out else None,
        num_rows=len(train) + len(held_out),
        bad_rows=bad.count,
        bad_row_names=names,
        identity=hashlib.sha256(json.dumps([train, held_out]).encode()).hexdigest(),
    )


def _dataset(rows: list[dict[str, Any]]) -> Any:
    require("datasets", "fine-tuning")
    import datasets

    return datasets.Dataset.from_list(rows)


def _row_hash(row: dict[str, Any]) -> int:
    return content_hash(json.dumps(row, sort_keys=True))


def _rows(
    sources: tuple[SourceOptions, ...], row_format: str, tokenizer: Any, bad: BadRows
) -> list[dict[str, Any]]:
    made = []
    for source in sources:
        for place, row in _source_rows(source):
            try:
                if row.problem:
                    raise _BadRow(row.problem)
                made.append(_convert(row.value, row_format, tokenizer))
            except _BadRow as problem:
                bad.add(row.number, f"{place}:{row.number}", str(problem))
    return made


def _source_rows(source: SourceOptions) -> Iterator[tuple[str, Row]]:
    if is_hub_dataset(source):
        for row in read_hub_rows(source, hub_revision(source)):
            yield source.path, row
        return
    for path in list_files(source):
        for row in read_rows(path):
            yield str(path), row


def _convert(row: Any, row_format: str, tokenizer: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise _BadRow(f"a {type(row).__name__} instead of fields by name")
    kind = _kind(row)
    if row_format not in ("auto", "chat") and kind != row_format:
        raise _BadRow(f"a row of the form {kind}, not {row_format}")
    return _CONVERTERS[kind](row, row_format == "chat", tokenizer)


def _kind(row: dict[str, Any]) -> str:
    if "messages" in row or "conversations" in row:
        return "chat"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    if "instruction" in row and ("output" in row or "response" in row):
        return "alpaca"
    fields = ", ".join(sorted(map(str, row))) or "none"
    raise _BadRow(
        "neither instruction and output, nor messages, nor prompt and completion "
        f"(its fields: {fields})"
    )


def _alpaca(row: dict[str, Any], as_chat: bool, tokenizer: Any) -> dict[str, Any]:
    instruction = _text(row, "instruction")
    answer = _text(row, "output" if "output" in row else "response")
    context = _text(row, "input" if "input" in row else "context", needed=False)
    if as_chat:
        question = f"{instruction}\n\n{context}" if context else instruction
        return _as_messages(question, answer)
    prompt = _WITH_INPUT if context else _WITHOUT_INPUT
    # A newline at its start would merge with the prompt's last one into another token.
    return {
        "prompt": prompt.format(instruction=instruction, input=context),
        "completion": _ended(answer.lstrip("\n"), tokenizer),
    }


def _prompt_completion(row: dict[str, Any], as_chat: bool, tokenizer: Any) -> dict[str, Any]:
    if isinstance(row["prompt"], list):
        return _split_messages([*row["prompt"], *_as_list(row["completion"])])
    prompt, completion = _text(row, "prompt"), _text(row, "completion")
    if as_chat:
        return _as_messages(prompt, completion)
    return {"prompt": prompt, "completion": _ended(completion, tokenizer)}


def _chat(row: dict[str, Any], as_chat: bool, tokenizer: Any) -> dict[str, Any]:
    return _split_messages(_as_list(row["messages"] if "messages" in row else row["conversations"]))


_CONVERTERS: dict[str, Callable[[dict[str, Any], bool, Any], dict[str, Any]]] = {
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "chat": _chat,
}


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _BadRow(f"messages are a {type(value).__name__}, not a list")
    return value


def _as_messages(question: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def _split_messages(values: list[Any]) -> dict[str, Any]:
    """The last assistant turn is the completion, and everything before it the prompt."""
    messages = [_message(value) for value in values]
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()  # a question nobody answered
    if len(messages) < 2:
        raise _BadRow("no assistant message after another one")
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def _message(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _BadRow(f"a message is a {type(value).__name__} instead of role and content")
    # ShareGPT's names for the same things.
    role: Any = value.get("role", value.get("from"))
    role = {"human": "user", "gpt": "assistant"}.get(role, role)
    content = value.get("content", value.get("value"))
    if role not in _ROLES:
        raise _BadRow(f"role {role!r} of a message is none of {', '.join(_ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise _BadRow(f"the content of a message by {role} is not a text, or empty")
    return {"role": role, "content": content}


def _text(row: dict[str, Any], name: str, needed: bool = True) -> str:
    value = row.get(name)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        raise _BadRow(f"field {name!r} is a {type(value).__name__}, not a text")
    if needed and not value.strip():
        raise _BadRow(f"field {name!r} is empty")
    return value


def _ended(completion: str, tokenizer: Any) -> str:
    eos = tokenizer.eos_token or ""
    return completion if completion.endswith(eos) else completion + eos

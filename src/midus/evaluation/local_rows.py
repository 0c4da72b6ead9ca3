"""Local files as the harness's own datasets: each function gives rows in the hub's form.

The prompt and the metric of a task are the harness's; what differs from file to file is how a
question is stored. A function takes a row of a file, or its whole text, and gives what the
harness's task reads.
"""

from collections.abc import Callable, Iterator
from typing import Any

Document = dict[str, Any]
_LETTERS = "ABCDEFGH"
_OPTIONS = 4


def as_it_is(row: Document) -> Document:
    return dict(row)


def arc(row: Document) -> Document:
    """`{query, choices, gold}` or the hub's own form."""
    if "query" not in row:
        return row
    question = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    labels = list(_LETTERS[: len(row["choices"])])
    choices = {"text": row["choices"], "label": labels}
    return {"question": question, "choices": choices, "answerKey": labels[row["gold"]]}


def boolq(row: Document) -> Document:
    """The answer as a number; the passages lack the title SuperGLUE puts before them."""
    return {**row, "label": int(row["answer"])}


def race(row: Document) -> Document:
    """An article's questions as one list, which the harness reads from its Python text."""
    problems = [
        {"question": question, "options": options, "answer": answer}
        for question, options, answer in zip(
            row["questions"], row["options"], row["answers"], strict=True
        )
    ]
    return {"article": row["article"], "problems": repr(problems)}


def mmlu(row: Document) -> Document:
    return {name: row[name] for name in ("question", "subject", "choices", "answer")}


def math(row: Document) -> Document:
    """The subject as the hub names its parts."""
    subject = row["type"].lower().replace("&", "and").replace(" ", "_")
    return {**row, "subject": subject}


def mathqa_letters(row: Document) -> Document:
    """A question with its lettered options; the space after "Answer:" belongs to the choice."""
    return {**row, "query": row["query"].rstrip()}


def logiqa(text: str) -> Iterator[Document]:
    """Blocks of eight lines: answer letter, passage, question and four lettered options."""

    def spaced(line: str) -> str:
        return line.replace(".", ". ").strip()

    for block in text.replace("\r\n", "\n").strip().split("\n\n"):
        label, context, question, *options = block.split("\n")
        if len(options) != _OPTIONS:
            raise ValueError(f"the block {label!r}, {context[:40]!r} has {len(options)} options")
        yield {
            "label": label.strip(),
            "context": spaced(context),
            "question": spaced(question),
            "options": [spaced(option[2:]) for option in options],
        }


def wikitext_pages(text: str) -> Iterator[Document]:
    """Pages: a heading of the first level begins one."""
    if not text.strip():
        raise ValueError("it is empty")
    page: list[str] = []
    for line in text.split("\n"):
        squeezed = line.replace("= = =", "===").replace("= =", "==").strip()
        if squeezed.startswith("= ") and squeezed.endswith(" ="):
            if "".join(page).strip():
                yield {"page": "\n".join(page)}
            page = []
        page.append(line)
    yield {"page": "\n".join(page)}


ROW_READERS: dict[str, Callable[[Document], Document]] = {
    "as_it_is": as_it_is,
    "arc": arc,
    "boolq": boolq,
    "race": race,
    "mmlu": mmlu,
    "math": math,
    "mathqa_letters": mathqa_letters,
}
TEXT_READERS: dict[str, Callable[[str], Iterator[Document]]] = {
    "logiqa": logiqa,
    "wikitext_pages": wikitext_pages,
}

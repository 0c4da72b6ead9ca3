"""Local files as the harness's own datasets: each function gives rows in the hub's form.

The prompt and the metric of a task are the harness's; what differs from file to file is how a
question is stored. A function takes the rows of a file (or its text) and gives documents with the
fields that the harness's task reads.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Document = dict[str, Any]
_LETTERS = "ABCDEFGH"


def as_they_are(rows: Iterable[Document]) -> Iterator[Document]:
    yield from rows


def arc(rows: Iterable[Document]) -> Iterator[Document]:
    """`{query, choices, gold}` or the hub's own form."""
    for row in rows:
        if "query" not in row:
            yield row
            continue
        question = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        labels = list(_LETTERS[: len(row["choices"])])
        choices = {"text": row["choices"], "label": labels}
        yield {"question": question, "choices": choices, "answerKey": labels[row["gold"]]}


def boolq(rows: Iterable[Document]) -> Iterator[Document]:
    """The answer as a number; the passages lack the title SuperGLUE puts before them."""
    for row in rows:
        yield {**row, "label": int(row["answer"])}


def race(rows: Iterable[Document]) -> Iterator[Document]:
    """An article's questions as one list, which the harness reads from its Python text."""
    for row in rows:
        problems = [
            {"question": question, "options": options, "answer": answer}
            for question, options, answer in zip(
                row["questions"], row["options"], row["answers"], strict=True
            )
        ]
        yield {"article": row["article"], "problems": repr(problems)}


def math(rows: Iterable[Document]) -> Iterator[Document]:
    """The subject as the hub names its parts."""
    for row in rows:
        subject = row["type"].lower().replace("&", "and").replace(" ", "_")
        yield {**row, "subject": subject}


def mathqa_letters(rows: Iterable[Document]) -> Iterator[Document]:
    """A question with its lettered options; the space after "Answer:" belongs to the choice."""
    for row in rows:
        yield {**row, "query": row["query"].rstrip()}


def logiqa(text: str) -> Iterator[Document]:
    """Blocks of eight lines: answer letter, passage, question and four lettered options."""

    def spaced(line: str) -> str:
        return line.replace(".", ". ").strip()

    for block in text.strip().split("\n\n"):
        label, context, question, *options = block.split("\n")
        yield {
            "label": label.strip(),
            "context": spaced(context),
            "question": spaced(question),
            "options": [spaced(option[2:]) for option in options],
        }


def wikitext_pages(text: str) -> Iterator[Document]:
    """Pages: a heading of the first level begins one."""
    page: list[str] = []
    for line in text.split("\n"):
        squeezed = line.replace("= = =", "===").replace("= =", "==").strip()
        if squeezed.startswith("= ") and squeezed.endswith(" ="):
            if "".join(page).strip():
                yield {"page": "\n".join(page)}
            page = []
        page.append(line)
    yield {"page": "\n".join(page)}


ROW_READERS: dict[str, Callable[[Iterable[Document]], Iterator[Document]]] = {
    "as_they_are": as_they_are,
    "arc": arc,
    "boolq": boolq,
    "race": race,
    "math": math,
    "mathqa_letters": mathqa_letters,
}
TEXT_READERS: dict[str, Callable[[str], Iterator[Document]]] = {
    "logiqa": logiqa,
    "wikitext_pages": wikitext_pages,
}

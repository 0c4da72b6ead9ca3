"""The steps of a build as datatrove runs them, on this machine, on Ray or on Slurm.

Three pipelines follow one another: a survey of all local documents (where only some are wanted),
their tokenisation, and one merge. Reading and merging are ours: datatrove's readers drop bad rows
without naming them, and its merger's result depends on how the tasks cut the corpus. Running,
tokenising and storing are datatrove's.

This module imports datatrove, so it is imported where a build runs and nowhere else.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer, TokenizedFile
from datatrove.utils.batching import batched
from loguru import logger

from midus.data.documents import file_documents, split_of, texts
from midus.data.folders import put_in_place
from midus.data.merging import INDEX, index_line, last_places, merge
from midus.data.plan import BuildPlan, Part
from midus.data.rows import BadRows, read_hub_rows

# datatrove reports every task on stderr; `loguru.logger.enable("datatrove")` brings it back.
logger.disable("datatrove")

# Documents tokenised together. A stream is read in steps of this size, so it decides which
# documents of it are taken: changing it changes bytes.
BATCH_SIZE = 128


class ReadDocuments(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Yields the documents of a task's parts, and notes what is wrong with the others.

    Args:
        plan: The build.
        is_survey: Whether local files are read for the survey: all documents, and no streams.
    """

    type = "reader"
    name = "midus documents"

    def __init__(self, plan: BuildPlan, is_survey: bool) -> None:
        super().__init__()
        self.plan = plan
        self.is_survey = is_survey
        self.train_tokens = [0] * len(plan.sources)
        """Tokens the next steps have made of each source so far."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        facts: dict[str, Any] = {
            "inputs": {},
            "named": [],
            "read": [0] * len(self.plan.sources),
            "bad": [0] * len(self.plan.sources),
        }
        places = {} if self.is_survey else last_places(self.plan)
        for part in self.plan.parts(rank):
            yield from self._read_part(part, facts, places)
        if not self.is_survey:
            _folder(self.plan, "facts", f"{rank:05d}.json").write_text(json.dumps(facts))

    def _read_part(
        self, part: Part, facts: dict[str, Any], places: dict[tuple[int, str], int]
    ) -> Iterator[Document]:
        item = self.plan.inputs[part.index]
        if self.is_survey and item.path is None:
            return
        if item.path and part.stripe == 0 and not self.is_survey:
            facts["inputs"][part.index] = _file_facts(Path(item.path))
        bad = BadRows()
        limits = self.plan.limits
        for text, where in self._documents(part, bad):
            facts["read"][item.source] += 1
            order, hashed, _, _ = index_line(text, 0, 0, self.plan)
            group = self.plan.group(item.source)
            if item.path is None or order <= places.get((group, split_of(hashed, limits)), 2**64):
                yield Document(
                    text=text, id=where, metadata={"source": item.source, "input": part.index}
                )
            if item.path is None and self._has_enough(item.source):
                break
        facts["bad"][item.source] += bad.count
        facts["named"] += [(part.index, *named) for named in bad.named]

    def _documents(self, part: Part, bad: BadRows) -> Iterator[tuple[str, str]]:
        item = self.plan.inputs[part.index]
        source = self.plan.sources[item.source]
        if item.path is not None:
            path = Path(item.path)
            return file_documents(path, source.text_field, bad, part.stripe, part.num_stripes)
        rows = read_hub_rows(source, item.revision, part.stripe, part.num_stripes)
        return texts(rows, source.path, source.text_field, bad)

    def _has_enough(self, source: int) -> bool:
        wanted = self.plan.wanted("train")[self.plan.group(source)]
        return wanted is not None and self.train_tokens[source] >= wanted


class SurveyDocuments(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Writes the place and the size of every document."""

    type = "survey"
    name = "midus survey"

    def __init__(self, plan: BuildPlan) -> None:
        super().__init__()
        self.plan = plan

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:
        lines = [
            index_line(
                document.text,
                len(document.text.encode()),
                document.metadata["source"],
                self.plan,
            )
            for document in data
        ]
        np.save(_folder(self.plan, "survey", f"{rank:05d}.npy"), np.array(lines, INDEX))


class TokenizeDocuments(DocumentTokenizer):  # type: ignore[misc]  # datatrove has no types
    """datatrove's tokenizer, which also writes the index of documents that the merge orders."""

    def __init__(self, plan: BuildPlan, reader: ReadDocuments) -> None:
        super().__init__(
            output_folder=str(plan.work_folder / "tokens"),
            tokenizer_name_or_path=str(plan.work_folder / "tokenizer.json"),
            save_index=False,
            save_final_metadata=False,
            shuffle_documents=False,
            batch_size=BATCH_SIZE,
        )
        self.plan = plan
        self.reader = reader
        self.token_size = np.dtype(plan.encoding.dtype).itemsize

    def write_unshuffled(self, data: Iterable[Document], filename: str) -> TokenizedFile:
        if self.plan.workers > 1:
            # One thread a process: the processes share the machine already.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        dtype = np.dtype(self.plan.encoding.dtype).newbyteorder("<")
        limits = self.plan.limits
        tokens_file = TokenizedFile(
            self.output_folder, filename, save_index=False, token_size=self.token_size
        )
        lines = []
        # A batch never holds documents of two inputs, so where a stream stops does not depend on
        # what else its task reads.
        inputs = groupby(data, key=lambda document: document.metadata["input"])
        batches = (batch for _, group in inputs for batch in batched(group, self.batch_size))
        for batch in batches:
            encoded_batch = self.tokenizer.encode_batch([document.text for document in batch])
            for document, encoded in zip(batch, encoded_batch, strict=True):
                ids = np.array(encoded.ids, dtype)
                source = document.metadata["source"]
                tokens_file.write_bytes(ids.tobytes())
                lines.append(index_line(document.text, len(ids), source, self.plan))
                if split_of(self.plan.split_hash(document.text), limits) == "train":
                    self.reader.train_tokens[source] += len(ids)
        tokens_file.close()
        rank = filename.split("_")[0]
        np.save(_folder(self.plan, "tokens", f"{rank}.npy"), np.array(lines, INDEX))
        return tokens_file


class MergeTokens(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Writes the token folder and puts it in its place."""

    type = "merger"
    name = "midus merge"

    def __init__(self, plan: BuildPlan) -> None:
        super().__init__()
        self.plan = plan

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        folder = self.plan.work_folder / "result"
        folder.mkdir()
        merge(self.plan, folder)
        put_in_place(folder, Path(self.plan.out), self.plan.overwrite)
        for name in ("survey", "tokens"):  # Slurm's logs stay
            shutil.rmtree(self.plan.work_folder / name, ignore_errors=True)


def pipelines(plan: BuildPlan) -> dict[str, tuple[list[Any], int]]:
    """The pipelines of a build in their order: name -> steps and number of tasks."""
    stages: dict[str, tuple[list[Any], int]] = {}
    if plan.is_surveyed:
        stages["survey"] = ([ReadDocuments(plan, True), SurveyDocuments(plan)], plan.tasks)
    reader = ReadDocuments(plan, False)
    stages["tokenize"] = ([reader, TokenizeDocuments(plan, reader)], plan.tasks)
    stages["merge"] = ([MergeTokens(plan)], 1)
    return stages


def _folder(plan: BuildPlan, folder: str, name: str) -> Path:
    path = plan.work_folder / folder
    path.mkdir(exist_ok=True)
    return path / name


def _file_facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            digest.update(piece)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}

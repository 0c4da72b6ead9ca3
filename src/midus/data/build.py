"""`build_tokens`: text in, a token folder out.

The bytes depend on the sources' contents, the tokenizer and the options below, and not on the
number of tasks and workers or on the executor.
"""

import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from midus.data.encoding import read_encoding
from midus.data.executors import (
    SlurmOptions,
    Track,
    check_executor,
    make_executors,
    no_bar,
    run_executors,
    submit,
)
from midus.data.folders import check_out, working_folder
from midus.data.merging import TooFewChosen
from midus.data.options import SourceOptions, check_share, check_whole
from midus.data.plan import BuildPlan, find_inputs
from midus.data.rows import require
from midus.data.tokens import TokenFolder
from midus.errors import MidusError

SHARD_TOKENS = 100_000_000


def build_tokens(
    sources: Sequence[SourceOptions],
    tokenizer_source: str | Path,
    out: str | Path,
    *,
    max_tokens: int | None = None,
    held_out: float = 0.01,
    eval_tokens: int = 262_144,
    test: float = 0.0,
    test_tokens: int = 262_144,
    seed: int = 0,
    by_weight: bool = True,
    tasks: int | None = None,
    workers: int = 1,
    executor: str = "local",
    slurm: SlurmOptions | None = None,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    track: Track = no_bar,
) -> TokenFolder | None:
    """Tokenises sources into a folder that appears whole or not at all.

    Args:
        sources: Where the text comes from.
        tokenizer_source: Model whose tokenizer is used.
        out: The folder to make.
        max_tokens: Training tokens wanted; the last document taken is cut to fit. Of a hub dataset
            only as many documents are read as that takes. Default: all there are.
        held_out: Share of documents kept apart by a hash of their content.
        eval_tokens: Most held-out tokens.
        test: Share of documents kept apart a second time, to choose on one and report on the other;
            texts that differ in whitespace are then in one split.
        test_tokens: Most test tokens.
        seed: Seed of the order of the documents.
        by_weight: Whether each source gives its weight's share of the tokens; otherwise the sources
            are one pool and give in proportion to their size.
        tasks: Parts the work is cut into; default: by files and workers.
        workers: Tasks that run at the same time. One worker runs in this process and tokenises with
            a thread a core.
        executor: ``local``, ``ray`` or ``slurm``.
        slurm: What Slurm must be told.
        shard_tokens: Tokens in one file of the folder.
        overwrite: Whether an existing token folder may be replaced.
        track: Progress bar around an iterable, given with its description.

    Returns:
        The folder; None with Slurm, where the jobs were submitted and the last of them makes it.
    """
    slurm = slurm or SlurmOptions()
    target = Path(os.path.realpath(Path(out).expanduser()))
    _check(sources, max_tokens, held_out, eval_tokens, seed, tasks, workers, shard_tokens)
    check_share("test", test)
    check_share("held_out + test", held_out + test)
    check_whole("test_tokens", test_tokens, 1)
    check_executor(executor, slurm)
    require("datatrove", "tokenising text")
    check_out(target, overwrite)
    inputs = find_inputs(tuple(sources), pooled=not by_weight and max_tokens is not None)
    if by_weight and max_tokens is None and len({source.weight for source in sources}) > 1:
        raise MidusError("weights share out a number of tokens; give that number with --tokens")
    plan = BuildPlan(
        sources=tuple(sources),
        inputs=inputs,
        encoding=read_encoding(tokenizer_source),
        max_tokens=max_tokens,
        held_out=held_out,
        eval_tokens=eval_tokens,
        test=test,
        test_tokens=test_tokens,
        seed=seed,
        shard_tokens=shard_tokens,
        by_weight=by_weight,
        out=str(target),
        overwrite=overwrite,
        tasks=tasks or (len(inputs) if workers == 1 else max(len(inputs), 2 * workers)),
        workers=workers,
    )
    if executor == "slurm":
        # The jobs outlive this process, so their folder is not deleted with it.
        work = target.parent / f".{target.name[:100]}.slurm-{uuid.uuid4().hex[:8]}"
        work.mkdir(parents=True)
        # Nobody is left to choose again if too few documents were chosen.
        submit(make_executors(_started(replace(plan, bytes_per_token=64), work), executor, slurm))
        return None
    while True:
        try:
            with working_folder(target) as work:
                started = _started(plan, work)
                run_executors(started, make_executors(started, executor, slurm), track)
            return TokenFolder(target)
        except TooFewChosen:
            plan = replace(plan, bytes_per_token=8 * plan.bytes_per_token)


def _started(plan: BuildPlan, work: Path) -> BuildPlan:
    (work / "tokenizer.json").write_text(plan.encoding.rules, encoding="utf-8")
    return plan.with_work(work)


def _check(
    sources: Sequence[SourceOptions],
    max_tokens: int | None,
    held_out: float,
    eval_tokens: int,
    seed: int,
    tasks: int | None,
    workers: int,
    shard_tokens: int,
) -> None:
    if not sources:
        raise MidusError("no sources; name at least one file, folder or hub dataset")
    check_share("held_out", held_out)
    check_whole("seed", seed, 0)
    counts = {"eval_tokens": eval_tokens, "workers": workers, "shard_tokens": shard_tokens}
    optional = {"max_tokens": max_tokens, "tasks": tasks}
    counts |= {name: value for name, value in optional.items() if value is not None}
    for name, value in counts.items():
        check_whole(name, value, 1)

"""Whole models on rendered requests, and what their answers come to."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from midus.errors import MidusError
from midus.evaluation.scoring import (
    SCORES_NAME,
    Share,
    open_scores,
    read_meta,
    read_render,
    rendered_tokenizer,
    score_task,
    tokenizer_digest,
)
from midus.evaluation.verify import Track
from midus.models.configuration import read_config
from midus.models.fitting import refuse_too_long
from midus.models.identity import model_id
from midus.models.loading import load_model, load_tokenizer
from midus.models.record import is_delta
from midus.models.sources import resolve_source
from midus.reports import machine_name

if TYPE_CHECKING:
    from midus.evaluation.evaluate import ModelScores, Selection
    from midus.evaluation.store import Store

_GPU_TOKENS, _CPU_TOKENS = 32768, 2048


def score_models(
    rendered: Path,
    models: list[str],
    output: Path,
    *,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    batch_tokens: int | None = None,
    track: Track = lambda items, _: items,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Answers every rendered request with every model, each in a folder of its own.

    Args:
        rendered: Folder that `render` wrote.
        models: Folders, hub ids, ``.gguf`` files or ``smollm2-135m``.
        output: Folder of the answers.
        base: For deltas: where their base is, if not where they say.
        dtype: Type to load in; default: the checkpoint's.
        device: Where to run; default: this process's GPU if there is one.
        batch_tokens: Tokens of a batch, padding included.
        track: Wraps loops in a progress bar.
        say: Told what is finished.
    """
    facts = read_render(rendered)
    share = Share.from_environment()
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    tokenizer = rendered_tokenizer(rendered)
    for source in models:
        config = read_config(resolve_source(source))
        if tokenizer_digest(load_tokenizer(source)) != facts["tokenizer"]:
            raise MidusError(
                f"{source} has another tokenizer than {facts['model']}, which the requests in "
                f"{rendered} were rendered for; render them for this model"
            )
        refuse_too_long(facts["max_length"], config, "the rendering's max_length")
        folder = _folder_for(source, output)
        model = load_model(
            source, base=base if is_delta(config) else None, dtype=dtype, device=device
        )
        on_gpu = model.device.type == "cuda"
        open_scores(
            folder,
            {
                "model": source,
                "model_id": model_id(source),
                "dtype": str(model.dtype).removeprefix("torch."),
                "requests": facts["requests"],
                "hardware": torch.cuda.get_device_name() if on_gpu else machine_name(),
            },
        )
        for task in facts["counts"]:
            answered = score_task(
                model,
                tokenizer,
                rendered,
                task,
                folder,
                share=share,
                batch_tokens=batch_tokens or (_GPU_TOKENS if on_gpu else _CPU_TOKENS),
                track=track,
            )
            if answered:
                say(f"{task:<40} {answered:>8,} answers in {folder}")
        del model


def aggregate_scores(
    rendered: Path,
    facts: dict[str, Any],
    scores: Path,
    selection: "Selection",
    store: "Store",
) -> tuple[list["ModelScores"], str]:
    """The scored models' numbers, and the machines they were scored on.

    Args:
        rendered: Folder that `render` wrote.
        facts: What it says of itself.
        scores: Folder that `score_models` wrote.
        selection: The tasks, loaded again.
        store: Where finished tasks are kept.
    """
    from midus.evaluation.evaluate import ModelScores
    from midus.evaluation.harness import pool
    from midus.evaluation.requests import aggregate
    from midus.evaluation.store import Settings

    folders = sorted(path.parent for path in scores.glob(f"*/{SCORES_NAME}"))
    if not folders:
        raise MidusError(f"{scores} holds no scores; give a folder that `midus eval score` wrote")
    tokenizer = rendered_tokenizer(rendered)
    models, machines = [], []
    for folder in folders:
        meta = read_meta(folder)
        if meta["requests"] != facts["requests"]:
            raise MidusError(f"{folder} answers other requests than {rendered} holds")
        machines.append(meta["hardware"])
        done = {}
        for column in selection.columns:
            kept = Settings(meta["dtype"], facts["max_length"], column.shots, facts["limit"])
            results = []
            for task in selection.tasks[column.key]:
                result = store.find(meta["model_id"], task, kept)
                if result is None:
                    result = aggregate(tokenizer, facts, task, folder)
                    store.keep(
                        meta["model"], meta["model_id"], task, kept, result, meta["hardware"]
                    )
                results.append(result)
            done[column.key] = pool(column, results)
        models.append(ModelScores(meta["model"], meta["model_id"], meta["dtype"], done))
    return models, ", ".join(dict.fromkeys(machines))


def _folder_for(model: str, output: Path) -> Path:
    """The folder of a model's answers: the one it has, or one under its name, or under its id."""
    identity = model_id(model)
    for path in sorted(output.glob(f"*/{SCORES_NAME}")):
        if read_meta(path.parent).get("model_id") == identity:
            return path.parent
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else path.name
    folder = output / name
    # Many models lie in a folder called "model"; another process may have begun this one just now.
    taken = (folder / SCORES_NAME).exists() and read_meta(folder).get("model_id") != identity
    if taken:
        folder = output / f"{name}-{identity}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder

"""`midus eval`: several models side by side on the paper's suites, or on a text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from midus.cli import options
from midus.cli.options import parse_names
from midus.errors import MidusError

if TYPE_CHECKING:
    from midus.evaluation.evaluate import ModelScores, Selection
    from midus.evaluation.paper import PaperRow

_DEFAULT = "run"


class _RunUnlessNamed(TyperGroup):
    """`midus eval MODEL …` is `midus eval run MODEL …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


evaluation = typer.Typer(
    cls=_RunUnlessNamed,
    help="Score models on the paper's suites: midus eval MODEL [MODEL …] --suite general.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Models = Annotated[list[str], typer.Argument(help="Folders, hub ids, .gguf files, smollm2-135m.")]
SuiteName = Annotated[
    str | None, typer.Option("--suite", help="wikitext, general, math, retrieval or longbench.")
]
Tasks = Annotated[
    str | None,
    typer.Option(help="Some of the suite's tasks, or any of the harness's, as in piqa,mmlu."),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of local files; without it the hub is read.")
]
Limit = Annotated[int | None, typer.Option(help="Documents of each task.", min=1)]
Shots = Annotated[int | None, typer.Option(help="Shots of tasks named without a suite.", min=0)]
MaxLength = Annotated[
    int | None, typer.Option(help="Tokens a forward pass may see; default: the model's.", min=2)
]
Base = Annotated[str | None, typer.Option(help="For deltas: their base, if it has moved.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="File to write the table to.")]
Paper = Annotated[bool, typer.Option("--paper", help="The paper's numbers, in their own columns.")]
Keep = Annotated[
    Path | None, typer.Option("--keep", help="Where finished tasks are kept; default: the cache.")
]


@evaluation.command(_DEFAULT)
def run(
    models: Models,
    suite: SuiteName = None,
    tasks: Tasks = None,
    data_dir: DataDir = None,
    limit: Limit = None,
    shots: Shots = None,
    batch_size: Annotated[str, typer.Option(help="Rows of a batch, or auto.")] = "auto",
    max_length: MaxLength = None,
    base: Base = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    keep: Keep = None,
    json_out: JsonOut = None,
    paper: Paper = False,
) -> None:
    """Score models side by side; what is finished already is not run again."""
    if batch_size != "auto" and not (batch_size.isdigit() and int(batch_size)):
        raise MidusError(f"batch_size={batch_size!r} is neither a whole number above 0 nor auto")
    _prepare()
    from midus.cli import console
    from midus.efficiency.hardware import hardware_name
    from midus.evaluation.evaluate import evaluate_models, select
    from midus.evaluation.store import Store
    from midus.models.loading import checked_device
    from midus.models.sources import resolve_source
    from midus.models.weights import dtype_named

    chosen = dtype_named(dtype) if dtype else None
    device = checked_device(device)
    for model in models:
        resolve_source(model)  # a name that is nothing is refused before anything is read
    hardware = hardware_name(_torch_device(device))
    selection = select(suite, parse_names("tasks", tasks), data_dir, shots)
    with console.without_foreign_bars():
        scores = evaluate_models(
            models,
            selection,
            limit=limit,
            base=base,
            dtype=chosen,
            device=device,
            batch_size=batch_size,
            max_length=max_length,
            store=Store(keep),
            hardware=hardware,
            say=lambda text: console.err.print(text, style="dim"),
        )
    _show(selection, scores, limit, paper, json_out, hardware)


@evaluation.command()
def render(
    model: Annotated[str, typer.Argument(help="A model with the tokenizer to render for.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    suite: SuiteName = None,
    tasks: Tasks = None,
    data_dir: DataDir = None,
    limit: Limit = None,
    shots: Shots = None,
    max_length: MaxLength = None,
) -> None:
    """Write tokenised requests, for machines without the harness or the network."""
    _prepare()
    from midus.cli import console
    from midus.evaluation import requests
    from midus.evaluation.evaluate import run_settings, select, usable_tokenizer
    from midus.evaluation.harness import harness_version
    from midus.models.sources import resolve_source

    folder = resolve_source(model)
    selection = select(suite, parse_names("tasks", tasks), data_dir, shots)
    unique = {
        task.name: task for column in selection.columns for task in selection.tasks[column.key]
    }
    length = run_settings(folder, None, max_length)["max_length"]
    facts = {
        "suite": suite,
        "tasks": parse_names("tasks", tasks),
        "shots": shots,
        "data_dir": str(data_dir.resolve()) if data_dir else None,
        "limit": limit,
        "max_length": length,
        "model": model,
        "lm_eval": harness_version(),
    }
    with console.without_foreign_bars():
        counts = requests.render(
            usable_tokenizer(folder),
            length,
            list(unique.values()),
            output,
            limit,
            facts,
        )
    for name, reason in selection.missing.items():
        console.out.print(f"left out   {name}: {reason}", style="yellow")
    console.out.print(f"{sum(counts.values()):,} requests of {len(counts)} tasks in {output}")


@evaluation.command()
def score(
    rendered: Annotated[Path, typer.Argument(help="Folder that `midus eval render` wrote.")],
    models: Models,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the answers.")],
    base: Base = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a batch; default: 32768, on a CPU 2048.", min=1)
    ] = None,
) -> None:
    """Answer rendered requests with torch alone; resumes, and shares the work under torchrun."""
    from midus.cli import console
    from midus.evaluation.score_models import score_models
    from midus.models.weights import dtype_named

    console.quieten_libraries()
    score_models(
        rendered,
        models,
        output,
        base=base,
        dtype=dtype_named(dtype) if dtype else None,
        device=device,
        batch_tokens=batch_tokens,
        track=console.track,
        say=console.out.print,
    )


@evaluation.command()
def aggregate(
    rendered: Annotated[Path, typer.Argument(help="Folder that `midus eval render` wrote.")],
    scores: Annotated[Path, typer.Argument(help="Folder that `midus eval score` wrote.")],
    data_dir: DataDir = None,
    keep: Keep = None,
    json_out: JsonOut = None,
    paper: Paper = False,
) -> None:
    """Make the table of what was scored elsewhere."""
    _prepare()
    from midus.cli import console
    from midus.evaluation.evaluate import select
    from midus.evaluation.score_models import aggregate_scores
    from midus.evaluation.scoring import read_render
    from midus.evaluation.store import Store

    facts = read_render(rendered)
    where = data_dir or (Path(facts["data_dir"]) if facts["data_dir"] else None)
    selection = select(facts["suite"], facts["tasks"], where, facts["shots"])
    with console.without_foreign_bars():
        models, hardware = aggregate_scores(rendered, facts, scores, selection, Store(keep))
    _show(selection, models, facts["limit"], paper, json_out, hardware)


@evaluation.command()
def perplexity(
    models: Models,
    text: Annotated[Path, typer.Option(help="A .txt file, or rows with a text field.")],
    window: Annotated[
        int | None, typer.Option(help="Tokens a forward pass sees; default: 1024 or what fits.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="How much to read.", min=2)] = None,
    base: Base = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
) -> None:
    """Perplexity of models on a text of your own."""
    from midus.cli import console
    from midus.data.ids import read_ids
    from midus.evaluation.perplexity import perplexity as measure
    from midus.models.configuration import read_config
    from midus.models.loading import load_model, load_tokenizer
    from midus.models.record import is_delta
    from midus.models.sources import resolve_source
    from midus.models.weights import dtype_named

    console.quieten_libraries()
    results = []
    for model in models:
        delta = is_delta(read_config(resolve_source(model)))
        loaded = load_model(
            model,
            base=base if delta else None,
            dtype=dtype_named(dtype) if dtype else None,
            device=device,
        )
        found = measure(
            loaded,
            read_ids(text, load_tokenizer(model), max_tokens),
            window=window,
            track=console.track,
        )
        results.append({"model": model, **found.to_dict()})
    if as_json:
        console.print_json({"text": str(text), "rows": results})
        return
    console.print_table(
        str(text),
        ["model", "perplexity", "tokens", "window"],
        [
            [
                row["model"],
                f"{row['perplexity']:.4f}",
                f"{row['num_tokens']:,}",
                str(row["window"]),
            ]
            for row in results
        ],
    )


def _prepare() -> None:
    from midus.cli import console
    from midus.evaluation.harness import require_harness

    require_harness()
    console.quieten_libraries()


def _torch_device(name: str) -> Any:
    import torch

    return torch.device(name)


def _show(
    selection: "Selection",
    models: "list[ModelScores]",
    limit: int | None,
    with_paper: bool,
    json_out: Path | None,
    hardware: str,
) -> None:
    from midus.cli import console
    from midus.evaluation.paper import matching_rows
    from midus.evaluation.table import eval_document, make_lines
    from midus.models.configuration import read_config
    from midus.models.sources import resolve_source
    from midus.reports import write_analysis

    rows: list[PaperRow] = []
    if with_paper:
        configs = [_config_or_none(model.model, read_config, resolve_source) for model in models]
        rows = matching_rows(selection.suite.name, [c for c in configs if c is not None])
        if not rows:
            console.err.print(f"the paper has no table of the {selection.suite.name} given")
    console.print_scores(
        selection.suite, make_lines(selection, models, rows), models, rows, selection.missing, limit
    )
    if json_out:
        document = eval_document(selection, models, rows, limit)
        single = models[0] if len(models) == 1 else None
        write_analysis(
            json_out,
            "midus.eval",
            single.model if single else None,
            single.model_id if single else None,
            hardware,
            [],
            document,
        )
        console.err.print(f"written to {json_out}", style="dim")


def _config_or_none(model: str, read_config: Any, resolve_source: Any) -> Any:
    try:
        return read_config(resolve_source(model, config_only=True))
    except MidusError:
        return None  # scored on another machine, where the model is

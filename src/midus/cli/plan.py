"""`midus plan`: will it fit, how long will it take, what will it cost; no GPU needed."""

import math
from dataclasses import replace
from typing import Annotated, Any

import typer

from midus.cli import options
from midus.errors import MidusError

_METHODS = (
    "base,llama_pro,opt_deus,midus:linear,midus:pkm,midus:ultramem,midus:hml,midus:hml@top_heavy"
)


def plan(
    shape: Annotated[
        str, typer.Option(help="Built-in model shape of the base, such as llama-3.1-8b.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Checkpoint folder or hub id of the base, instead of --shape.")
    ] = "",
    gpu: Annotated[str, typer.Option(help="Kind of GPU, such as h200.")] = "h200",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas, as in 1,8,64.")] = "1",
    tokens: Annotated[str, typer.Option(help="Tokens to train on, as in 1.5e9.")] = "1.5e9",
    methods: Annotated[
        str, typer.Option(help="method[:memory][@placement], with commas.")
    ] = _METHODS,
    sequence: Annotated[int, typer.Option(help="Tokens of a training sequence.")] = 2048,
    micro_batch: Annotated[int, typer.Option(help="Sequences of one pass on one GPU.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Passes of one iteration.")] = 16,
    precision: Annotated[
        str, typer.Option(help="bf16 (everything, as the paper), mixed (midus train) or float32.")
    ] = "bf16",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute blocks in the backward pass.")
    ] = False,
    plain_blocks: Annotated[
        bool, typer.Option("--plain-blocks", help="Train with blocks of the base as they are.")
    ] = False,
    eager_steps: Annotated[
        bool, typer.Option("--eager-steps", help="Train without CUDA graphs.")
    ] = False,
    num_subkeys: Annotated[
        int | None, typer.Option(help="Row and column sub-keys of memory layers (paper: n).")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Slots memory layers read per head and token.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Dollars a GPU hour; default: an example.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens in the cache when serving.")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences served at a time.")] = 1,
    as_json: options.AsJson = False,
) -> None:
    """Predict memory, time and cost of training and serving each method, without a GPU.

    Formulas and what of them is measured: docs/plan.md. More than one GPU is on paper.
    """
    from midus.cli import console
    from midus.efficiency.cost_checked import error_sentences, read_errors
    from midus.efficiency.cost_model import predict
    from midus.efficiency.cost_sizes import read_stack
    from midus.efficiency.cost_training import Run
    from midus.efficiency.gpus import find_gpu
    from midus.efficiency.protocol import parse_numbers
    from midus.efficiency.subjects import parse_subjects

    console.quieten_libraries()
    chosen = find_gpu(gpu)
    counts = tuple(dict.fromkeys(parse_numbers("gpus", gpus)))
    num_tokens = _number("tokens", tokens, 1, "1.5e9")
    hourly = chosen.price if price is None else _number("price", price, 0.001, "2.5")
    _at_least_one("context", context)
    _at_least_one("batch", batch)
    run = Run(
        sequence=sequence,
        micro_batch=micro_batch,
        accumulation=accumulation,
        precision=precision,  # type: ignore[arg-type]  # checked by Run
        checkpointing=checkpointing,
        fused_blocks=not plain_blocks,
        cuda_graphs=not eager_steps,
    )
    for count in counts:
        replace(run, gpus=count)  # says what is wrong with it before anything is counted
    subjects = parse_subjects(methods)
    base_config = _base_config(shape, model)
    sizes = {"num_subkeys": num_subkeys, "top_k": top_k}
    changes = {name: value for name, value in sizes.items() if value is not None}
    predictions = []
    for name, subject in console.track(
        list(zip(methods.split(","), subjects, strict=True)), "counting"
    ):
        wanted = subject.changed(**changes) if changes and subject.memory else subject
        stack = read_stack(wanted.grown_config(base_config))
        predictions.append(
            predict(
                name.strip(), stack, chosen, run, gpu_counts=counts, context=context, batch=batch
            )
        )
    errors = read_errors()
    notes = _notes(chosen, counts, price, predictions)
    notes += error_sentences(chosen, errors, base_config.hidden_size)
    if as_json:
        console.print_json(
            {
                "base": model or shape,
                "gpu": chosen.name,
                "tokens": num_tokens,
                "price": hourly,
                "sequence": sequence,
                "micro_batch": micro_batch,
                "accumulation": accumulation,
                "precision": precision,
                "checkpointing": checkpointing,
                "fused_blocks": not plain_blocks,
                "cuda_graphs": not eager_steps,
                "context": context,
                "batch": batch,
                "methods": [_as_json(p, chosen, run, num_tokens, hourly) for p in predictions],
                "measured_error": errors,
                "notes": notes,
            }
        )
        return
    _print_memory(predictions)
    _print_times(predictions, num_tokens, hourly)
    _print_serving(predictions, context, batch)
    _print_answer(predictions, chosen, run)
    for note in notes:
        console.out.print(note, style="yellow")


def _as_json(
    prediction: Any, gpu: Any, run: Any, num_tokens: float, price: float
) -> dict[str, Any]:
    from midus.efficiency.cost_model import fit_sentence

    stack = prediction.stack
    return {
        "method": prediction.name,
        "params": {"trainable": stack.params_trainable, "total": stack.params_total},
        "positions": list(stack.positions),
        "lowest_trained_block": stack.lowest,
        "answer": fit_sentence(prediction, gpu, run),
        "gpus_needed": prediction.gpus_needed,
        "training": [t.to_dict(num_tokens, price) for t in prediction.training],
        "serving": prediction.serving.to_dict(),
    }


def _print_memory(predictions: list[Any]) -> None:
    columns = ["method", "GPUs", "trainable", "total", "weights", "gradients", "optimizer"]
    columns += ["activations", "loss", "workspace", "libraries", "gathered"]
    columns += ["peak", "at", "fits", "micro batch"]
    rows = []
    for prediction in predictions:
        params = (prediction.stack.params_trainable, prediction.stack.params_total)
        for training in prediction.training:
            memory = training.memory
            parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations)
            others = (memory.loss, memory.workspace, memory.libraries, memory.gathered)
            rows.append(
                [
                    prediction.name,
                    str(training.run.gpus),
                    *(_count(count) for count in params),
                    *(f"{part / 1e9:.1f}" for part in (*parts, *others)),
                    f"{memory.total / 1e9:.1f}",
                    memory.peak,
                    _yes(training.fits),
                    f"up to {training.largest_micro_batch}"
                    if training.largest_micro_batch
                    else "-",
                ]
            )
    _print_table("training memory, GB on each GPU", columns, rows)


def _print_times(predictions: list[Any], num_tokens: float, price: float) -> None:
    columns = ["method", "GPUs", "GFLOP/token", "PFLOP/iter", "GB moved/iter", "s/iter"]
    columns += ["tokens/s", "hours", "cost", "bound by", "talking, s/iter"]
    rows = []
    for prediction in predictions:
        for training in prediction.training:
            talking = training.communication_seconds
            rows.append(
                [
                    prediction.name,
                    str(training.run.gpus),
                    f"{training.flop_per_token / 1e9:.2f}",
                    f"{training.flop_per_iteration / 1e15:.2f}",
                    f"{training.moved_bytes / 1e9:,.0f}",
                    f"{training.seconds:.2f}",
                    f"{training.tokens_s:,.0f}",
                    f"{training.hours(num_tokens):.1f}",
                    f"${training.gpu_hours(num_tokens) * price:,.0f}",
                    training.bound,
                    f"{talking:.2f}" if talking else "-",
                ]
            )
    _print_table(f"training on {num_tokens:,.0f} tokens at ${price:g} a GPU hour", columns, rows)


def _print_serving(predictions: list[Any], context: int, batch: int) -> None:
    columns = ["method", "weights", "value caches", "KV cache", "workspace", "total", "fits"]
    columns += ["decode tok/s", "bound by", "prefill ms", "bound by"]
    rows = []
    for prediction in predictions:
        serving = prediction.serving
        parts = (serving.weights, serving.value_caches, serving.kv_cache, serving.workspace)
        rows.append(
            [
                prediction.name,
                *(f"{part / 1e9:.2f}" for part in parts),
                f"{serving.total / 1e9:.1f}",
                _yes(serving.fits),
                f"{serving.decode_tokens_s:.1f}",
                serving.decode_bound,
                f"{serving.prefill_ms:.1f}",
                serving.prefill_bound,
            ]
        )
    title = f"serving on one GPU, GB at a context of {context:,} and {batch} sequence(s) at a time"
    _print_table(f"{title}; prefill of 2,048 tokens", columns, rows)


def _print_answer(predictions: list[Any], gpu: Any, run: Any) -> None:
    from midus.cli import console
    from midus.efficiency.cost_model import fit_sentence

    console.out.print("; ".join(fit_sentence(p, gpu, run) for p in predictions), style="bold")


def _notes(
    gpu: Any, counts: tuple[int, ...], price: float | None, predictions: list[Any]
) -> list[str]:
    notes = []
    trainings = [training for p in predictions for training in p.training]
    if any(t.bound == "host" for t in trainings) or any(
        p.serving.prefill_bound == "host" for p in predictions
    ):
        notes.append(
            "times bound by the host are Python's on the measured machine, where two rows of the "
            "same network differed by a third; another host may be faster or slower"
        )
    kinds = {p.stack.inserted.memory.kind for p in predictions if _has_memory(p.stack)}
    if coarse := sorted(kinds & {"linear", "ultramem"}):
        notes.append(
            f"times of {' and '.join(coarse)} are coarse: the passes of their search are one "
            "number that was calibrated on the Llama-3.1-8B shape"
        )
    if max(counts) > 1:
        notes.append(
            "rows of more than one GPU are on paper: full sharding (FSDP), communication hidden "
            "behind arithmetic, links and network at their data sheets' rates; never measured"
        )
    if price is None:
        notes.append(f"${gpu.price:g} a GPU hour is an example; give yours with --price")
    return notes


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.measure import Measurement
    from rich.table import Table

    from midus.cli import console

    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.out.print(title, style="bold")
    # A table that is wider than the terminal is better than numbers cut in two.
    wide = console.out.options.update(width=1000)
    table.width = Measurement.get(console.out, wide, table).maximum
    console.out.print(table)
    console.out.print()


def _base_config(shape: str, model: str) -> Any:
    from midus.models.record import record_of
    from midus.models.shapes import SHAPES, shape_config
    from midus.upscaling.inspect import target_config

    if bool(shape) == bool(model):
        raise MidusError("give a base: either --shape, such as llama-3.1-8b, or --model")
    if shape:
        from midus.errors import suggest

        if shape not in SHAPES:
            raise MidusError(f"shape={shape!r} is unknown; {suggest(shape, SHAPES)}")
        return shape_config(shape)
    config = target_config(model)
    if record_of(config).get("positions"):
        raise MidusError(f"{model} is up-scaled already; plan starts from its base")
    return config


def _yes(fits: bool) -> str:
    return "yes" if fits else "NO"


def _has_memory(stack: Any) -> bool:
    return stack.inserted is not None and stack.inserted.memory is not None


def _count(params: int) -> str:
    return f"{params / 1e9:.2f} B" if params >= 5e6 else f"{params / 1e6:.2f} M"


def _number(name: str, value: Any, smallest: float, example: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not smallest <= number < math.inf:
        raise MidusError(
            f"{name}={value!s} must be a number of at least {smallest:g}, such as {example}"
        )
    return number


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise MidusError(f"{name}={value} must be a positive whole number")

"""`midus analyze slots`: which slots a text uses, what fires them, what they promote."""

from pathlib import Path
from typing import Annotated, Any

import typer

from midus.cli import options
from midus.cli.analysis_folder import analysis_folder, analysis_name
from midus.errors import MidusError


def slots(
    model: Annotated[str, typer.Argument(help="A model with memory blocks, full or delta.")],
    text: Annotated[
        Path, typer.Option(help="Text to read: .txt, or rows with a field `text` (.jsonl, .xz …).")
    ],
    base: Annotated[
        str | None, typer.Option(help="For a delta: its base, if not where it says.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="How much of the text to read.", min=1)] = 16_384,
    window: Annotated[int, typer.Option(help="Tokens a forward pass sees.", min=1)] = 512,
    block: Annotated[
        int | None,
        typer.Option(
            help="Memory block to look into, by its index in the final stack; default: the one "
            "with the largest corrections."
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="How many of its busiest slots to show.", min=1)] = 10,
    dtype: options.Dtype = None,
    device: options.Device = None,
    output: options.AnalysisFolder = None,
    as_json: options.AsJson = False,
) -> None:
    """Show which slots of the memories a text uses, what fires them and what they promote."""
    if max_tokens < window:
        raise MidusError(
            f"max_tokens={max_tokens} is less than window={window}; raise the one or lower the "
            "other"
        )
    from midus.analysis.slot_plots import plot_slots
    from midus.analysis.slots import analyze_slots, check_memory
    from midus.cli import console
    from midus.data.ids import read_ids
    from midus.data.rows import require
    from midus.efficiency.hardware import hardware_name
    from midus.models.configuration import read_config
    from midus.models.identity import model_id
    from midus.models.loading import load_model, load_tokenizer
    from midus.models.sources import resolve_source
    from midus.models.weights import dtype_named
    from midus.reports import write_analysis

    console.quieten_libraries()
    require("matplotlib", "the figure")
    folder = analysis_folder("slots", model, output)
    check_memory(read_config(resolve_source(model)), block)
    tokenizer = load_tokenizer(model)
    ids = read_ids(text, tokenizer, max_tokens)
    loaded = load_model(
        model, base=base, dtype=dtype_named(dtype) if dtype else None, device=device
    )
    report = analyze_slots(
        loaded, tokenizer, ids, window=window, block=block, top=top, track=console.track
    )
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{analysis_name(model)}: {report.num_tokens:,} tokens of {text.name}"
    plot_slots(report, folder / "slots.png", title)
    write_analysis(
        folder / "slots.json",
        "midus.slots",
        model,
        model_id(model),
        hardware_name(loaded.device),
        ["slots.png"],
        {"text": str(text), **report.to_dict()},
    )
    if as_json:
        typer.echo((folder / "slots.json").read_text())
        return
    _print(report)
    console.out.print(f"written    {folder / 'slots.json'}, {folder / 'slots.png'}")


def _print(report: Any) -> None:
    from midus.cli import console

    first, blocks = report.blocks[0], report.blocks
    console.out.print(
        f"{report.num_tokens:,} tokens in windows of {report.window}; {first.kind}, "
        f"{first.num_heads} heads of {first.num_slots:,} slots, {first.top_k} read a token"
    )
    console.print_table(
        "\nuse of slots",
        ["block", "anchor", "used", "entropy", "weighted", "on 1 %", "dead a head", "by no head"],
        [_use(block) for block in blocks],
    )
    console.print_table(
        "\nheads and values",
        ["block", "Jaccard", "cosine", "norm: median", "p90", "max", "zero rows", "‖m‖ / ‖x‖"],
        [_values(block) for block in blocks],
    )
    console.out.print(f"\nbusiest slots of block {report.busiest['block']}", style="bold")
    for slot in report.busiest["slots"]:
        _print_slot(slot, report.num_tokens)


def _use(block: Any) -> list[str]:
    return [
        str(block.index),
        str(block.anchor),
        f"{100 * block.used:.1f} %",
        f"{block.entropy:.3f}",
        f"{block.weighted_entropy:.3f}",
        f"{100 * block.busiest_percent_share:.1f} %",
        f"{sum(block.dead_slots) / block.num_heads:,.0f}",
        f"{block.slots_no_head_uses:,}",
    ]


def _values(block: Any) -> list[str]:
    means = [block.head_overlap[f"mean_{name}"] for name in ("jaccard", "cosine")]
    norms = block.value_norms
    return [
        str(block.index),
        *("" if mean is None else f"{mean:.3f}" for mean in means),
        *(f"{norms[name]:.3g}" for name in ("median", "p90", "max")),
        f"{norms['zero_rows']:,}",
        f"{100 * block.correction_ratio:.2f} %",
    ]


def _print_slot(slot: dict[str, Any], num_tokens: int) -> None:
    from midus.analysis.slot_contexts import is_hub
    from midus.cli import console

    place = "" if slot["row"] is None else f" (row {slot['row']}, column {slot['col']})"
    hub = ", hub" if is_hub(slot["count"], num_tokens) else ""
    console.out.print(
        f"head {slot['head']}, slot {slot['slot']}{place}: at "
        f"{100 * slot['count'] / num_tokens:.1f} % of the tokens, summed weight "
        f"{slot['weight']:,.1f}{hub}",
        style="bold magenta",
    )
    for label, key in (("at", "tokens"), ("before", "next_tokens")):
        tokens = (f"{t['token']!r} {t['count']} ({t['lift']:.1f}x)" for t in slot[key])
        console.out.print(f"  {label:<11}" + ", ".join(tokens))
    for key in ("promotes", "suppresses"):
        tokens = (f"{t['token']!r} {t['logit']:+.2f}" for t in slot[key])
        console.out.print(f"  {key:<11}" + ", ".join(tokens))
    for context in slot["contexts"]:
        left, token, right = (_one_line(context[part]) for part in ("left", "token", "right"))
        console.out.print(f"  {context['weight']:<9.2f}  {left}⟦{token}⟧{right}")


def _one_line(text: str) -> str:
    return text.replace("\r", "").replace("\n", "⏎").replace("\t", " ")

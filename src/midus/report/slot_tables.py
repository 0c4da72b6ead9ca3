"""Numbers of `slots.json`: use of every memory block, and what the busiest slots hold."""

from typing import Any

from midus.report.document import Cell, Content, Part, Row, Table, Text
from midus.report.numbers import count, decimal, share, significant

_TOKENS_SHOWN = 5
# As `midus analyze slots` has it.
_HUB_SHARE = 0.5


def slot_tables(values: dict[str, Any]) -> list[Content]:
    """The setting, a row a block, the busiest slots of one block, and where they fire."""
    first = values["blocks"][0]
    setting = (
        f"{count(values['num_tokens'])} tokens of {values['text']} in windows of "
        f"{count(values['window'])}; {first['kind']}, {first['num_heads']} heads of "
        f"{count(first['num_slots'])} slots, {first['top_k']} read by a head at a token."
    )
    busiest = values["busiest"]
    content: list[Content] = [Text(setting), _blocks(values["blocks"])]
    if busiest["slots"]:
        content += [_busiest(busiest, values["num_tokens"]), _contexts(busiest)]
    return content


def _blocks(blocks: list[dict[str, Any]]) -> Table:
    rows: list[Row] = [
        [
            str(block["index"]),
            share(block["used"]),
            decimal(block["entropy"], 3),
            decimal(block["weighted_entropy"], 3),
            share(block["busiest_percent_share"]),
            count(block["slots_no_head_uses"]),
            decimal(block["head_overlap"]["mean_jaccard"], 3),
            significant(block["value_norms"]["median"], 3),
            count(block["value_norms"]["zero_rows"]),
            f"{100 * block['correction_ratio']:.2f} %",
        ]
        for block in blocks
    ]
    columns: Row = [
        "block",
        "used",
        "entropy",
        "weighted entropy",
        "on busiest 1 %",
        "unused slots",
        "overlap",
        "median norm",
        "zero rows",
        "‖m‖ / ‖x‖",
    ]
    notes = [
        "Used: (head, slot) pairs read at least once. Entropy: of the choices, 1 is even; weighted "
        "counts each by its weight. On busiest 1 %: share of the choices that fall on the busiest "
        "hundredth of the pairs. Unused: by any head. Overlap: mean Jaccard index of two heads' "
        "slots. Norm: of what a slot writes. ‖m‖ / ‖x‖: correction against residual stream."
    ]
    return Table("Use of slots by memory block", columns, [Part(rows)], notes)


def _busiest(busiest: dict[str, Any], num_tokens: int) -> Table:
    rows: list[Row] = [
        [
            Cell(_name(slot), note="hub" if slot["count"] >= _HUB_SHARE * num_tokens else ""),
            count(slot["count"]),
            _tokens(slot["tokens"]),
            _tokens(slot["next_tokens"]),
            _tokens(slot["promotes"]),
            _tokens(slot["suppresses"]),
        ]
        for slot in busiest["slots"]
    ]
    columns: Row = ["slot", "times read", "read at", "followed by", "promotes", "suppresses"]
    notes = [
        "With a token at which a slot is read, or that follows: how much more frequent it is there "
        "than in the whole text. Hub: read at half of the tokens or more.",
        "Promotes, suppresses: what the slot's value adds to and takes from the logits through the "
        "final norm's gain and the unembedding, later blocks left out.",
    ]
    caption = f"Busiest slots of block {busiest['block']}"
    return Table(caption, columns, [Part(rows)], notes, is_text=True)


def _contexts(busiest: dict[str, Any]) -> Table:
    rows: list[Row] = [
        [
            _name(slot),
            Cell(context["left"], marked=context["token"], rest=context["right"]),
            decimal(context["weight"], 3),
        ]
        for slot in busiest["slots"]
        for context in slot["contexts"]
    ]
    caption = f"Where the busiest slots of block {busiest['block']} are read most strongly"
    columns: Row = ["slot", "context, the reading token marked", "weight"]
    return Table(caption, columns, [Part(rows)], is_folded=True, is_text=True)


def _name(slot: dict[str, Any]) -> str:
    return f"head {slot['head']}, slot {slot['slot']}"


def _tokens(tokens: list[dict[str, Any]]) -> Cell:
    return Cell("", tokens=tuple(map(_token, tokens[:_TOKENS_SHOWN])))


def _token(token: dict[str, Any]) -> tuple[str, str]:
    # The logits of what a slot promotes say less, and are left out.
    lift = f"{decimal(token['lift'], 1)}-fold" if "lift" in token else ""
    return _visible(token["token"]), lift


def _visible(token: str) -> str:
    return token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")

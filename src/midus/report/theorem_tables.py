"""Numbers of `theorem.json`: what was checked, how far off it was, what HIVE's rank buys."""

from typing import Any

from midus.report.document import Content, Part, Row, Table, Text
from midus.report.numbers import count, significant


def theorem_tables(values: dict[str, Any]) -> list[Content]:
    """The checks on random instances, the curves, and the checks on a model where there is one."""
    setting = f"{count(values['instances'])} random instances in float64, seed {values['seed']}."
    content: list[Content] = [Text(setting), _checks("Checks on random instances", values)]
    heterogeneity = values["heterogeneity"]
    content.append(
        _curve(
            "What sharing one bank costs, by how much the heads' targets differ",
            ["difference of targets", "gap, computed", "gap, by Proposition 1"],
            [heterogeneity[name] for name in ("scale", "gap", "formula")],
        )
    )
    for name, kind in (("rank_curve", "exactly"), ("near_rank_curve", "nearly")):
        what = f"targets whose banks share a factorization {kind}"
        content.append(_ranks(f"HIVE's loss by rank, {what}", values[name]))
    if values["model_check"]:
        content += _model(values["model_check"])
    return content


def _checks(caption: str, values: dict[str, Any]) -> Table:
    rows: list[Row] = [
        ["equalities: largest relative error", _tiny(values["max_equality_error"])],
        ["bounds: largest relative violation", _tiny(values["max_bound_violation"])],
        ["Theorem 1: smallest gap, share of the shared loss", _tiny(values["min_strict_gap"])],
    ]
    if "counter_example_gap" in values:
        rows.append(
            ["identical projected targets: largest gap", _tiny(values["counter_example_gap"])]
        )
    return Table(caption, ["", "value"], [Part(rows)])


def _curve(caption: str, columns: list[str], lists: list[list[float]]) -> Table:
    rows: list[Row] = [[_tiny(value) for value in row] for row in zip(*lists, strict=True)]
    return Table(caption, list(columns), [Part(rows)], is_folded=True)


def _ranks(caption: str, curve: dict[str, Any]) -> Table:
    table = _curve(caption, ["rank", "HIVE's loss"], [curve["rank"], curve["hive_loss"]])
    note = (
        f"Shared bank: {_tiny(curve['shared_loss'])}; a bank for each head: "
        f"{_tiny(curve['headwise_loss'])}. Shares of the loss of no correction."
    )
    return Table(table.caption, table.columns, table.parts, [note], is_folded=True)


def _model(check: dict[str, Any]) -> list[Content]:
    own, common = check["own_retrieval"], check["common_retrieval"]
    curve = common["rank_curve"]
    setting = (
        f"Block {check['block']} of the model, {check['num_heads']} heads, "
        f"{count(check['num_tokens'])} tokens; {count(check['slots_read_by_several'])} of "
        f"{count(check['slots_read'])} slots are read by more than one head."
    )
    rows: list[Row] = [
        ["each head's own retrieval", _tiny(own["shared_loss"]), _tiny(own["headwise_loss"])],
        [
            f"head {common['head']}'s retrieval for all",
            _tiny(curve["shared_loss"]),
            _tiny(curve["headwise_loss"]),
        ],
    ]
    losses = Table(
        "Least losses on the model's block",
        ["retrieval", "one shared bank", "a bank for each head"],
        [Part(rows)],
        ["Shares of the loss of no correction."],
    )
    ranks = _ranks(f"HIVE's loss by rank on block {check['block']}", curve)
    return [Text(setting), _checks("Checks on the model's block", check), losses, ranks]


def _tiny(value: Any) -> str:
    return significant(value, 3)

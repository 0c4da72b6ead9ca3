"""Numbers of `heads.json`: what changed from base to grown model, and every layer's scores."""

from typing import Any

from midus.report.document import Content, Part, Row, Table, Text
from midus.report.numbers import count, decimal, share, significant


def head_tables(values: dict[str, Any]) -> list[Content]:
    """The setting, the summary where there is a base, and all layers, folded."""
    setting = (
        f"{count(values['num_examples'])} examples of {values['task']}, reduction "
        f"{values['reduction']}, loss {values['loss']}"
        f"{', L2-normed a layer' if values['layer_norm'] else ''}, {values['dtype']}."
    )
    content: list[Content] = [Text(setting)]
    if values["summary"]:
        content.append(_summary(values["summary"]))
    return [*content, _layers(values)]


def _summary(summary: dict[str, Any]) -> Table:
    importance, gini = summary["mean_importance"], summary["mean_gini"]
    comparison: list[Row] = [
        ["mean importance", significant(importance["base"]), significant(importance["model"])],
        ["mean Gini coefficient over heads", decimal(gini["base"], 3), decimal(gini["model"], 3)],
    ]
    higher, layers = summary["num_layers_of_higher_variance"], summary["num_base_layers"]
    notes = [
        f"{higher} of {layers} layers have a higher variance over heads than in the base; ratio "
        f"of variances {significant(summary['mean_variance_ratio'], 3)} in the mean, "
        f"{significant(summary['median_variance_ratio'], 3)} in the median.",
        f"{share(summary['share_of_risen_heads'])} of the heads rose. Variance rises with the "
        "scores themselves; the Gini coefficient does not.",
    ]
    return Table(
        "Heads of the base's layers, before and after",
        ["", "base", "grown model"],
        [Part(comparison)],
        notes,
    )


def _layers(values: dict[str, Any]) -> Table:
    scores, variance = values["importance"]["model"], values["variance"]["model"]
    base_variance = values["variance"]["base"]
    rows: list[Row] = []
    for layer in values["layers"]["model"]:
        index, is_base = layer["index"], layer["kind"] == "base"
        heads = scores[index]
        top = max(range(len(heads)), key=lambda head: heads[head])
        rows.append(
            [
                str(index),
                f"{layer['kind']} {layer['base_index']}"
                if is_base
                else f"{layer['kind']} (from {layer['base_index']})",
                significant(sum(heads) / len(heads), 3),
                f"{significant(heads[top], 3)} (head {top})",
                significant(variance[index], 3),
                *(
                    [significant(base_variance[layer["base_index"]], 3) if is_base else ""]
                    if base_variance
                    else []
                ),
            ]
        )
    columns: Row = ["index", "block", "mean", "highest", "variance over heads"]
    if base_variance:
        columns.append("variance in the base")
    return Table("Head importance by layer", columns, [Part(rows)], is_folded=True)

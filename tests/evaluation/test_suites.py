from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from midus import MidusError
from midus.evaluation.harness import _manager, _tasks_folder, any_column
from midus.evaluation.paper import PAPER, matching_rows
from midus.evaluation.suites import SUITES, find_suite


def names(suite):
    return [column.key for column in SUITES[suite].columns]


def test_the_general_suite_is_the_papers():
    tasks = ["arc_easy", "logiqa", "winogrande", "commonsense_qa", "boolq", "piqa", "mmlu"]
    assert names("general") == ["wikitext", *tasks]
    general = SUITES["general"]
    assert general.average.over == tuple(tasks)
    assert {column.metric for column in general.columns} == {"word_perplexity", "acc"}
    assert {column.shots for column in general.columns} == {0}


def test_math_and_retrieval_have_five_shots():
    for suite in ("math", "retrieval"):
        assert {column.shots for column in SUITES[suite].columns} == {5}
    filters = {c.key: c.filter for c in SUITES["math"].columns if "gsm8k" in c.key}
    assert filters == {
        "gsm8k": "strict-match",
        "gsm8k (flexible)": "flexible-extract",
        "gsm8k_cot": "strict-match",
        "gsm8k_cot (flexible)": "flexible-extract",
    }


def test_longbench_is_its_sixteen_english_tasks():
    longbench = SUITES["longbench"]
    assert len(longbench.columns) == 16
    assert not any("zh" in c.key or c.key.endswith("_e") for c in longbench.columns)
    in_categories = [name for category in longbench.categories for name in category.over]
    assert sorted(in_categories) == sorted(longbench.average.over) == sorted(names("longbench"))


@pytest.mark.parametrize(
    "column", [column for suite in SUITES.values() for column in suite.columns], ids=lambda c: c.key
)
def test_every_task_is_in_the_installed_harness_with_its_metric_and_filter(column):
    from fnmatch import fnmatchcase

    from midus.evaluation.harness import _settings

    manager = _manager(column.folder)
    found = [name for name in manager.all_subtasks if fnmatchcase(name, column.pattern)]
    assert found
    for name in found:
        settings = _settings(name, manager.task_index[name].yaml_path)
        assert column.metric in [entry["metric"] for entry in settings["metric_list"]]
        filters = settings.get("filter_list") or [{"name": "none"}]
        assert column.filter in [entry["name"] for entry in filters]


@pytest.mark.parametrize(
    ("folder", "group", "pattern", "count"),
    [("mmlu/default", "mmlu", "mmlu_*", 57), ("hendrycks_math", "hendrycks_math", "*_math_*", 7)],
)
def test_groups_are_the_harnesss_own(folder, group, pattern, count):
    from fnmatch import filter as matching

    manager = TaskManager(include_defaults=False, include_path=[Path(_tasks_folder()) / folder])
    index = manager.task_index

    def leaves(name):
        entry = index[name]
        if entry.kind.name == "TASK":
            return {name}
        children = entry.tags if entry.kind.name == "TAG" else entry.cfg["task"]
        return set().union(*map(leaves, children))

    assert leaves(group) == set(matching(manager.all_subtasks, pattern))
    assert len(leaves(group)) == count


def test_the_papers_averages_are_means_of_its_columns():
    # A printed average may differ by the rounding of its parts.
    for suite in ("general", "math", "retrieval"):
        over = SUITES[suite].average.over
        for row in PAPER[suite]:
            mean = sum(row.scores[key] for key in over) / len(over)
            assert abs(mean - row.average) < 0.0151, row


def test_overall_is_the_mean_over_tasks():
    sizes = {category.label: len(category.over) for category in SUITES["longbench"].categories}
    for row in PAPER["longbench"]:
        total = sum(row.scores[label] * size for label, size in sizes.items())
        assert abs(total / 16 - row.average) < 0.0151, row


def test_an_unknown_suite_suggests_a_name():
    with pytest.raises(MidusError, match=r"suite='general2' is unknown; did you mean general\?"):
        find_suite("general2")


class Config:
    model_type = "llama"
    hidden_size, num_hidden_layers, vocab_size = 4096, 32, 128256


def test_the_papers_row_is_found_by_the_models_shape():
    rows = matching_rows("general", [Config()])
    assert [(r.backbone, r.method, r.stage) for r in rows] == [
        ("Llama-3.1-8B", "Base", "CPT"),
        ("Llama-3.1-8B", "Base", "SFT"),
    ]
    assert rows[0].scores["mmlu"] == 58.61


def test_other_models_see_the_papers_smaller_base_and_its_method():
    other = Config()
    other.hidden_size = 576
    rows = matching_rows("math", [other])
    assert [row.method for row in rows] == ["Base", "MIDUS-HML"]
    assert {row.backbone for row in rows} == {"Llama-3.2-1B"}


@pytest.mark.parametrize(
    ("task", "is_share"),
    [("hellaswag", True), ("gsm8k", True), ("wmt14-en-fr", False)],
)
def test_only_shares_are_shown_in_percent(task, is_share):
    assert any_column(task, None).percent is is_share

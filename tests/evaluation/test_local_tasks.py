"""Local files give the harness's own questions: same prompts, same choices, same metric."""

import lzma
import shutil
from dataclasses import replace

import benchmarks
import pytest
from benchmarks import hub_documents
from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from midus import MidusError
from midus.evaluation import local
from midus.evaluation.evaluate import select
from midus.evaluation.harness import SEED, _tasks_folder, load_tasks
from midus.evaluation.local import SHOTS, find_local, local_column, local_tasks
from midus.evaluation.suites import SUITES

# The harness's file, the maker of its documents, and the splits it reads them from.
TASKS = {
    "arc_easy": ("arc/arc_easy.yaml", benchmarks.arc, ["test", "train", "validation"]),
    "logiqa": ("logiqa/logiqa.yaml", benchmarks.logiqa, ["test", "train", "validation"]),
    "winogrande": ("winogrande/default.yaml", benchmarks.winogrande, ["validation", "train"]),
    "commonsense_qa": (
        "commonsense_qa/default.yaml",
        benchmarks.commonsense_qa,
        ["validation", "train"],
    ),
    "boolq": ("super_glue/boolq/default.yaml", benchmarks.boolq, ["validation", "train"]),
    "piqa": ("piqa/piqa.yaml", benchmarks.piqa, ["validation", "train"]),
    "gsm8k": ("gsm8k/gsm8k.yaml", benchmarks.gsm8k, ["test", "train"]),
    "gsm8k_cot": ("gsm8k/gsm8k-cot.yaml", benchmarks.gsm8k, ["test", "train"]),
    "race": ("race/race.yaml", benchmarks.race, ["test"]),
    "longbench_multi_news": ("longbench/multi_news.yaml", benchmarks.longbench, ["test"]),
    "wikitext": ("wikitext/wikitext.yaml", benchmarks.wikitext, ["test", "train", "validation"]),
}


def column_of(name):
    return next(c for suite in SUITES.values() for c in suite.columns if c.key == name)


def harness_own(path, documents, splits, shots):
    """The harness's task as it stands, with the hub's documents and none of our code."""
    config = dict(load_yaml(_tasks_folder() / path, resolve_func=True))
    for key in ("tag", "group"):
        config.pop(key, None)
    data = Dataset.from_list(documents)
    config["custom_dataset"] = lambda **_: DatasetDict(dict.fromkeys(splits, data))
    task = ConfigurableTask(config=config)
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=SEED)
    return task


def questions(task, limit=10):
    task.set_fewshot_seed(seed=SEED)
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return [(i.request_type, i.doc_id, i.idx, i.arguments) for i in task.instances]


def same_measure(ours, theirs):
    mine, other = ours.config, theirs.config
    for name in ("metric_list", "filter_list", "generation_kwargs", "target_delimiter"):
        assert getattr(mine, name) == getattr(other, name), name
    assert [f.name for f in ours._filters] == [f.name for f in theirs._filters]
    assert ours.config.output_type == theirs.config.output_type


@pytest.mark.parametrize("name", TASKS)
def test_ten_documents_are_asked_as_the_harness_asks_them(name, data_dir):
    path, make, splits = TASKS[name]
    column = local_column(column_of(name))
    (ours,) = load_tasks(column, data_dir)
    theirs = harness_own(path, hub_documents(make), splits, column.shots)
    mine, other = questions(ours.task), questions(theirs)
    assert len(mine) >= 10
    if column.shots and name == "race":
        # The harness draws RACE's shots from the test split itself, and so do we.
        assert all(text.count("Article:") == 6 for *_, (text, _) in mine)
    assert mine == other
    same_measure(ours.task, theirs)
    for i in range(10):
        assert ours.task.doc_to_target(ours.task.eval_docs[i]) == theirs.doc_to_target(
            theirs.eval_docs[i]
        )


def test_files_of_mmlu_are_read_once_for_all_subjects(data_dir, monkeypatch):
    read, rows = [], local.read_rows
    monkeypatch.setattr(local, "read_rows", lambda path: read.append(path.name) or rows(path))
    local._read_rows.cache_clear()
    for subject in ("anatomy", "virology"):
        load_tasks(replace(column_of("mmlu"), tasks=f"mmlu_{subject}"), data_dir)
    assert len(read) == len(set(read)) > 0


def test_a_template_is_compiled_once_for_all_documents(data_dir, monkeypatch):
    from lm_eval.utils import env

    (ours,) = load_tasks(column_of("arc_easy"), data_dir)
    compiled, plain = [], env.compile
    monkeypatch.setattr(env, "compile", lambda text: compiled.append(text) or plain(text))
    env.from_string.cache_clear()
    assert len(questions(ours.task, 10)) == 40
    assert len(compiled) == len(set(compiled)) > 0


def test_mmlu_subjects_are_asked_as_the_harness_asks_them(data_dir):
    column = column_of("mmlu")
    # The little benchmark has two of the 57 subjects.
    for subject, odd in (("anatomy", 1), ("virology", 0)):
        (ours,) = load_tasks(replace(column, tasks=f"mmlu_{subject}"), data_dir)
        documents = [doc for i, doc in enumerate(hub_documents(benchmarks.mmlu)) if i % 2 == odd]
        theirs = harness_own(
            f"mmlu/default/mmlu_{subject}.yaml", documents, ["test", "dev"], shots=0
        )
        assert questions(ours.task) == questions(theirs)
        same_measure(ours.task, theirs)
    text = questions(theirs)[0][3][0]
    assert text.startswith("The following are multiple choice questions (with answers) about viro")


@pytest.mark.parametrize(
    ("name", "variant", "path", "make", "split"),
    [
        ("triviaqa", "triviaqa_wiki", "triviaqa/default.yaml", benchmarks.triviaqa, "validation"),
        ("nq_open", "nq_open_heldout", "nq_open/nq_open.yaml", benchmarks.nq_open, "validation"),
    ],
)
def test_shots_are_taken_from_scoring_where_there_is_no_training_split(
    name, variant, path, make, split, data_dir
):
    column = replace(local_column(column_of(name)), shots=3)
    assert (column.key, column.variant_of) == (variant, name)
    (ours,) = load_tasks(column, data_dir)
    documents = hub_documents(make)
    held_out = [documents[i] for i in (0, 50, 100)]
    assert list(ours.task.eval_docs) == [d for i, d in enumerate(documents) if i % 50]
    assert list(ours.task.dataset[SHOTS]) == held_out
    theirs = harness_own(path, list(ours.task.eval_docs), [split, "train"], shots=0)
    ours.task.set_config(key="num_fewshot", value=0)
    assert questions(ours.task) == questions(theirs)
    same_measure(ours.task, theirs)


def test_math_is_split_by_subject_and_keeps_its_shots_out(data_dir):
    column = replace(local_column(column_of("hendrycks_math")), shots=1)
    assert column.key == "hendrycks_math_heldout"
    (ours,) = load_tasks(replace(column, tasks="hendrycks_math_counting_and_prob"), data_dir)
    of_subject = [d for d in hub_documents(benchmarks.math) if d["part"].startswith("counting")]
    scored = [doc["problem"] for doc in ours.task.eval_docs]
    assert scored == [d["problem"] for i, d in enumerate(of_subject) if i % 50]
    assert ours.task.eval_docs[0]["answer"] == "4", "the fifth problem is the second of its subject"


def test_mathqa_with_letters_asks_for_a_letter(data_dir, tmp_path):
    import json

    folder = tmp_path / "mathqa"
    folder.mkdir()
    rows = [
        {"query": f"Question: {i}?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: ", "choices": list("ABCD")}
        for i in range(300)
    ]
    text = "".join(json.dumps({**row, "gold": 2}) + "\n" for row in rows)
    (folder / "llmfoundry_math_qa.jsonl").write_text(text)
    column = local_column(column_of("mathqa"))
    assert column.key == "mathqa_4way"
    (ours,) = load_tasks(column, tmp_path)
    first = questions(ours.task, limit=1)
    assert [arguments[1] for *_, arguments in first] == [" A", " B", " C", " D"]
    prompt = first[0][3][0]
    assert prompt.count("Question:") == 6
    assert prompt.endswith("Question: 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:")
    assert ours.task.doc_to_target(ours.task.eval_docs[0]) == 2


def test_every_yaml_stands_for_a_task_of_a_suite():
    columns = [c.pattern for suite in SUITES.values() for c in suite.columns]
    for task in local_tasks():
        assert any(find_local(pattern) == task for pattern in columns), task.replaces


def test_what_is_not_there_is_left_out_and_named(data_dir):
    selection = select("longbench", [], data_dir)
    assert [column.key for column in selection.columns] == ["longbench_multi_news"]
    assert len(selection.missing) == 15
    reason = selection.missing["longbench_narrativeqa"]
    assert str(data_dir / "longbench" / "narrativeqa.jsonl.xz") in reason


def test_a_missing_file_that_was_asked_for_is_named(data_dir):
    with pytest.raises(
        MidusError, match=r"'longbench_narrativeqa' reads .*narrativeqa.jsonl.xz, which is mi"
    ):
        select("longbench", ["longbench_narrativeqa"], data_dir)


def test_a_broken_line_is_named(data_dir, tmp_path):
    shutil.copytree(data_dir / "piqa", tmp_path / "piqa")
    path = tmp_path / "piqa" / "validation.jsonl.xz"
    with lzma.open(path, "rt") as file:
        lines = file.readlines()
    lines[6] = '{"goal": "cut'
    path.unlink()
    path.with_suffix("").write_text("".join(lines))
    with pytest.raises(
        MidusError, match=r"line 7 of .*validation.jsonl is no row of task 'piqa' \(inv"
    ):
        select("general", ["piqa"], tmp_path)


def test_too_few_documents_for_shots_are_said(data_dir):
    with pytest.raises(MidusError, match="has 3 documents to take shots from, and 5 are wanted"):
        select("retrieval", ["triviaqa_wiki"], data_dir)


@pytest.mark.parametrize(
    ("name", "rows", "sentence"),
    [
        ("piqa/validation.jsonl", [{"goal": "a"}, {"sol1": "b"}], "line 2 of .*it has no 'goal'"),
        ("boolq/validation.jsonl", [{"question": "a"}], "line 1 of .* is no row of task 'boolq_un"),
        ("race/test_high.jsonl", [{"article": "a", "questions": ["q"], "options": []}], "line 1"),
        ("winogrande/validation.jsonl", [["a"]], "line 1 of .* is no row of task 'winogrande'"),
        ("commonsense_qa/validation.jsonl", [], "finds no documents in .*; fetch the file again"),
    ],
)
def test_rows_that_are_none_are_named(tmp_path, name, rows, sentence):
    import json

    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = "retrieval" if name.startswith("race") else "general"
    with pytest.raises(MidusError, match=sentence):
        select(suite, [name.split("/")[0]], tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("logiqa/Test.txt", b"a\nOne.\nTwo?\nA.x\nB.y"),
        ("wikitext2/wiki.test.raw", b"\n"),
        ("wikitext2/wiki.test.raw", b"\xff\xfe"),
    ],
)
def test_texts_that_are_none_are_named(tmp_path, name, text):
    for file in (name, "logiqa/Eval.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(text)
    with pytest.raises(MidusError, match=f"{name} is no file of task"):
        select("general", ["logiqa" if "logiqa" in name else "wikitext"], tmp_path)


def test_a_name_selects_every_column_of_its_task(data_dir):
    selection = select("math", ["gsm8k"], data_dir)
    assert [column.key for column in selection.columns] == ["gsm8k", "gsm8k (flexible)"]
    assert [column.filter for column in selection.columns] == ["strict-match", "flexible-extract"]


def test_two_subjects_of_one_local_task_stay_two(data_dir, monkeypatch):
    from midus.evaluation.suites import Column

    one, two = (
        local_column(Column(f"hendrycks_math_{name}", name, "exact_match", "hendrycks_math"))
        for name in ("algebra", "num_theory")
    )
    assert one.key != two.key


def test_shots_of_a_suite_are_its_own(data_dir):
    with pytest.raises(MidusError, match="shots=3 was given with --suite"):
        select("general", [], data_dir, shots=3)


def test_unknown_tasks_suggest_names(data_dir):
    with pytest.raises(MidusError, match=r"'arc_esy' is not in the suite general; did you mean ar"):
        select("general", ["arc_esy"], data_dir)
    with pytest.raises(MidusError, match="is no folder"):
        select("general", [], data_dir / "nowhere")
    with pytest.raises(MidusError, match="nothing to measure"):
        select(None, [], data_dir)

"""`midus eval` end to end on a tiny model: numbers by hand, both ways to get them, and resuming."""

import gzip
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from benchmarks import hub_documents, save_byte_model
from benchmarks import piqa as piqa_documents
from benchmarks import wikitext as wikitext_documents
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from tiny import MEMORY, load

from midus import UpscaleConfig, upscale_checkpoint
from midus.evaluation import evaluate
from midus.evaluation.suites import SUITES
from midus.models.loading import load_tokenizer


def run_json(midus, tmp_path, *args):
    path = tmp_path / "table.json"
    result = midus("eval", *args, "--json", path)
    assert result.code == 0, result.err
    return json.loads(path.read_text()), result.out


def log_likelihood(model, context, continuation):
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        scores = model(ids).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[len(context) - 1 :].sum().item()


def test_accuracy_is_as_by_hand(midus, tmp_path, byte_model, data_dir):
    table, out = run_json(
        midus, tmp_path, byte_model, "--tasks", "piqa", "--data-dir", data_dir, "--limit", 12
    )
    model, tokenizer = load(byte_model), load_tokenizer(byte_model)
    right = 0
    for doc in hub_documents(piqa_documents, 12):
        context = tokenizer(f"Question: {doc['goal']}\nAnswer:").input_ids
        sums = [
            log_likelihood(model, context, tokenizer(f" {solution}").input_ids)
            for solution in (doc["sol1"], doc["sol2"])
        ]
        right += (sums[1] > sums[0]) == doc["label"]
    score = table["rows"][0]["scores"]["piqa"]
    assert score["value"] == right / 12
    assert score["num_docs"] == 12
    p = right / 12
    assert math.isclose(score["stderr"], math.sqrt(p * (1 - p) / 11), rel_tol=1e-9)
    assert "at most the first 12 documents of each task" in out
    assert f"{100 * p:.2f} ±" in out


def test_word_perplexity_is_as_by_hand(midus, tmp_path, byte_model, data_dir):
    table, _ = run_json(
        midus, tmp_path, byte_model, "--suite", "wikitext", "--data-dir", data_dir, "--limit", 3
    )
    model, tokenizer = load(byte_model), load_tokenizer(byte_model)
    total = num_words = 0
    for doc in hub_documents(wikitext_documents, 3):
        # What stands before the first heading belongs to nobody; the harness drops blank pages.
        page = doc["page"]
        ids = tokenizer(wikitext_detokenizer({"page": page})).input_ids
        assert len(ids) < 512, "one window a page, or this is not by hand"
        total += log_likelihood(model, [tokenizer.bos_token_id], ids)
        num_words += len(re.split(r"\s+", page))
    score = table["rows"][0]["scores"]["wikitext"]
    assert math.isclose(score["value"], math.exp(-total / num_words), rel_tol=1e-5)


def test_an_untrained_up_scaled_model_scores_as_its_base(midus, tmp_path, byte_model, data_dir):
    upscale_checkpoint(byte_model, tmp_path / "grown", UpscaleConfig(memory=MEMORY), delta=True)
    args = ["--suite", "general", "--tasks", "wikitext,piqa", "--data-dir", data_dir, "--limit", 5]
    table, out = run_json(midus, tmp_path, byte_model, tmp_path / "grown", *args)
    base, grown = table["rows"]
    assert base["scores"] == grown["scores"]
    assert base["model_id"] != grown["model_id"]
    assert base["average"] is None, "two of seven tasks have no average"
    assert "Average" in out


def test_rendered_and_scored_is_the_direct_run(midus, tmp_path, byte_model, data_dir):
    """All three kinds of request, in two processes' shares, and one of them killed."""
    tasks = "piqa,wikitext,race,gsm8k,winogrande,boolq"
    common = ["--data-dir", data_dir, "--limit", 4, "--tasks", tasks]
    direct, _ = run_json(midus, tmp_path, byte_model, *common, "--keep", tmp_path / "a")
    result = midus("eval", "render", byte_model, "-o", tmp_path / "r", *common)
    assert result.code == 0, result.err
    assert "48 requests of 6 tasks" in result.out
    for rank in ("0", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", rank)
            patch.setenv("WORLD_SIZE", "2")
            result = midus("eval", "score", tmp_path / "r", byte_model, "-o", tmp_path / "s")
            assert result.code == 0, result.err
    scores = tmp_path / "s" / "bytes"
    part = scores / "piqa.0-of-2.jsonl"
    text = part.read_text()
    part.write_text('{"torn\n' + text[: len(text) // 2])  # as a killed process leaves it
    aggregate = ["eval", "aggregate", tmp_path / "r", tmp_path / "s", "--keep", tmp_path / "b"]
    result = midus(*aggregate)
    assert result.code == 2
    assert "of the 8 requests of task 'piqa' have no answer" in result.err
    result = midus("eval", "score", tmp_path / "r", byte_model, "-o", tmp_path / "s")
    assert result.code == 0, result.err
    assert "piqa" in result.out
    assert "race" not in result.out, "what is answered is not asked again"
    apart, _ = run_json(midus, tmp_path, *aggregate[1:])
    for key, score in direct["rows"][0]["scores"].items():
        other = apart["rows"][0]["scores"][key]
        value, apart_value = score["value"], other["value"]
        if key == "wikitext":  # the harness adds in float32, and an exponential enlarges it
            value, apart_value = math.log(value), math.log(apart_value)
        assert math.isclose(value, apart_value, rel_tol=1e-6), key
        assert score["num_docs"] == other["num_docs"]
        assert score["stderr"] == pytest.approx(other["stderr"])
    assert {"gsm8k", "wikitext", "boolq_untitled"} < direct["rows"][0]["scores"].keys()


def test_greedy_answers_are_those_of_the_harness(midus, tmp_path, byte_model, data_dir):
    """Not only the score, which is 0 either way: the text itself, cut at the same places."""
    from lm_eval.models.huggingface import HFLM

    from midus.evaluation.harness import load_tasks

    column = next(c for c in SUITES["math"].columns if c.key == "gsm8k")
    (task,) = load_tasks(column, data_dir)
    task.task.set_fewshot_seed(seed=1234)
    task.task.build_all_requests(limit=3, rank=0, world_size=1)
    lm = HFLM(pretrained=load(byte_model), tokenizer=load_tokenizer(byte_model), batch_size=3)
    for instance in task.task.instances:
        # Stops that a random model does write, in the middle of a batch.
        instance.arguments[1]["until"] = ["e", "zz"]
    theirs = lm.generate_until(task.task.instances)
    rendered = tmp_path / "r"
    args = ["--data-dir", data_dir, "--limit", 3, "--suite", "math", "--tasks", "gsm8k"]
    assert midus("eval", "render", byte_model, "-o", rendered, *args).code == 0
    path = rendered / "gsm8k.jsonl.gz"
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    with gzip.open(path, "wt") as file:
        for line in lines:
            file.write(json.dumps({**line, "until": ["e", "zz", "</s>"]}) + "\n")
    assert midus("eval", "score", rendered, byte_model, "-o", tmp_path / "s").code == 0
    entries = [json.loads(x) for x in (tmp_path / "s/bytes/gsm8k.0-of-1.jsonl").open()]
    ours = [entry["text"] for entry in sorted(entries, key=lambda entry: entry["id"])]
    assert ours == theirs
    assert any(ours)


def test_scoring_needs_no_harness_and_no_datasets(midus, tmp_path, byte_model, data_dir):
    rendered = tmp_path / "r"
    args = ["--data-dir", data_dir, "--limit", 2, "--tasks", "piqa"]
    assert midus("eval", "render", byte_model, "-o", rendered, *args).code == 0
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in ('lm_eval', 'datasets', 'pyarrow'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"sys.argv = ['midus', 'eval', 'score', {str(rendered)!r}, {str(byte_model)!r},"
        f" '-o', {str(tmp_path / 's')!r}]\n"
        "from midus.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "s/bytes/piqa.0-of-1.jsonl").read_text().splitlines()) == 4


def test_finished_tasks_are_not_run_again(midus, tmp_path, byte_model, data_dir, monkeypatch):
    args = [byte_model, "--tasks", "piqa,winogrande", "--data-dir", data_dir, "--limit", 3]
    first, _ = run_json(midus, tmp_path, *args)
    monkeypatch.setattr(evaluate, "load_model", lambda *a, **k: pytest.fail("loaded again"))
    again, _ = run_json(midus, tmp_path, *args)
    assert again["rows"] == first["rows"]


def test_a_killed_evaluation_goes_on(midus, tmp_path, byte_model, data_dir, monkeypatch):
    args = [byte_model, "--tasks", "piqa,winogrande", "--data-dir", data_dir, "--limit", 3]
    ran, real = [], evaluate.run_task

    def killed_at_the_second(lm, task, limit):
        ran.append(task.name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return real(lm, task, limit)

    monkeypatch.setattr(evaluate, "run_task", killed_at_the_second)
    assert midus("eval", *args).code == 130
    assert midus("eval", *args).code == 0
    assert ran == ["piqa", "winogrande", "winogrande"]


def test_another_model_in_the_same_folder_is_another_result(midus, tmp_path, data_dir):
    args = [tmp_path / "m", "--tasks", "piqa", "--data-dir", data_dir, "--limit", 6]
    ids = []
    for seed in (0, 1):
        save_byte_model(tmp_path / "m", seed=seed)
        table, _ = run_json(midus, tmp_path, *args)
        ids.append(table["rows"][0]["model_id"])
    assert ids[0] != ids[1]


def test_the_best_model_is_bold_and_the_paper_has_its_own_column(
    midus, tmp_path, byte_model, data_dir
):
    save_byte_model(tmp_path / "other", seed=5)
    args = ["--suite", "general", "--tasks", "wikitext,arc_easy,boolq", "--data-dir", data_dir]
    table, out = run_json(
        midus, tmp_path, byte_model, tmp_path / "other", *args, "--limit", 6, "--paper"
    )
    assert "the paper's numbers are those of Llama-3.2-1B after CPT" in out
    assert out.splitlines()[1].split()[-4:] == ["paper:", "Base", "paper:", "MIDUS-HML"]
    assert [row["method"] for row in table["paper"]] == ["Base", "MIDUS-HML"]
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert lines["ARC"].split()[-2:] == ["68.69", "66.16"]
    assert "63.61" not in out, "other documents than the paper's have no number of the paper"
    assert "boolq_untitled" in lines


def test_partial_suites_say_so(midus, byte_model, data_dir, tmp_path):
    (tmp_path / "piqa").symlink_to(data_dir / "piqa")
    result = midus("eval", byte_model, "--suite", "general", "--data-dir", tmp_path, "--limit", 2)
    assert result.code == 0, result.err
    assert "partial: 7 of 8 columns are missing" in result.out
    assert f"{tmp_path / 'mmlu/test.jsonl.xz'}, which is missing" in result.out
    average = next(line for line in result.out.splitlines() if line.startswith("Average"))
    assert average.split() == ["Average", "mean", "-"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--suite", "general2"], "suite='general2' is unknown; did you mean general?"),
        (["--tasks", ","], "tasks=',' names nothing; give one or more, or leave it out"),
        (["--suite", "general", "--tasks", "piqqa"], "did you mean piqa"),
        (["--suite", "general", "--batch-size", "0"], "batch_size='0' is neither a whole"),
        (["--suite", "general", "--data-dir", "nowhere"], "data_dir='nowhere' is no folder"),
    ],
)
def test_bad_input_is_one_sentence(midus, byte_model, args, sentence):
    result = midus("eval", byte_model, *args)
    assert result.code == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1


def test_a_folder_that_is_no_model_is_refused_before_anything_runs(midus, tmp_path, data_dir):
    (tmp_path / "empty").mkdir()
    for args in (["--tasks", "piqa", "--data-dir", data_dir], ["--suite", "general"]):
        result = midus("eval", tmp_path / "empty", *args)
        assert result.code == 2
        assert "has no config.json; give a Hugging Face model folder" in result.err


def test_a_tokenizer_without_padding_will_do(midus, tmp_path, byte_model, data_dir):
    save_byte_model(tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    assert load_tokenizer(tmp_path / "m").pad_token is None
    args = ["--tasks", "piqa,gsm8k_cot", "--data-dir", data_dir, "--limit", 3]
    without, _ = run_json(midus, tmp_path, tmp_path / "m", *args)
    having, _ = run_json(midus, tmp_path, byte_model, *args)
    assert without["rows"][0]["scores"] == having["rows"][0]["scores"]


def test_a_tokenizer_without_any_end_is_refused(midus, tmp_path, data_dir):
    save_byte_model(tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for name in ("pad_token", "bos_token", "eos_token"):
        del config[name]
    path.write_text(json.dumps(config))
    result = midus("eval", tmp_path / "m", "--tasks", "piqa", "--data-dir", data_dir)
    assert result.code == 2
    assert "has neither a beginning nor an end token" in result.err


def test_scores_of_another_model_are_not_mixed(midus, tmp_path, byte_model, data_dir):
    args = ["--data-dir", data_dir, "--limit", 2, "--tasks", "piqa"]
    assert midus("eval", "render", byte_model, "-o", tmp_path / "r", *args).code == 0
    assert midus("eval", "score", tmp_path / "r", byte_model, "-o", tmp_path / "s").code == 0
    save_byte_model(tmp_path / "x" / "bytes", seed=9)
    other = [tmp_path / "x" / "bytes", "-o", tmp_path / "s"]
    assert midus("eval", "score", tmp_path / "r", *other).code == 0
    # Again, and under another spelling: each model keeps the folder it has.
    assert midus("eval", "score", tmp_path / "r", byte_model, *other).code == 0
    folders = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert len(folders) == 2
    assert folders[0] == "bytes"
    table, _ = run_json(midus, tmp_path, "aggregate", tmp_path / "r", tmp_path / "s")
    assert len({row["model_id"] for row in table["rows"]}) == 2


def test_another_rendering_in_the_same_folder_is_noticed(midus, tmp_path, byte_model, data_dir):
    args = ["--data-dir", data_dir, "--limit", 2, "--suite", "wikitext", "-o", tmp_path / "r"]
    score = ["eval", "score", tmp_path / "r", byte_model, "-o", tmp_path / "s"]
    assert midus("eval", "render", byte_model, *args).code == 0
    assert midus(*score).code == 0
    assert midus("eval", "render", byte_model, *args, "--max-length", 64).code == 0
    result = midus(*score)
    assert result.code == 2
    assert "whose requests differ from this run's" in result.err


def test_a_model_with_another_tokenizer_is_refused(midus, tmp_path, byte_model, data_dir):
    args = ["--data-dir", data_dir, "--limit", 2, "--tasks", "piqa"]
    assert midus("eval", "render", byte_model, "-o", tmp_path / "r", *args).code == 0
    save_byte_model(tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"bos_token": "<s>"', '"bos_token": "</s>"'))
    result = midus("eval", "score", tmp_path / "r", tmp_path / "m", "-o", tmp_path / "s")
    assert result.code == 2
    assert "has another tokenizer than" in result.err


def test_a_model_of_fewer_positions_is_refused(midus, tmp_path, byte_model, data_dir):
    args = ["--data-dir", data_dir, "--limit", 2, "--tasks", "piqa"]
    assert midus("eval", "render", byte_model, "-o", tmp_path / "r", *args).code == 0
    save_byte_model(tmp_path / "m", max_position_embeddings=16)
    result = midus("eval", "score", tmp_path / "r", tmp_path / "m", "-o", tmp_path / "s")
    assert result.code == 2
    assert "max_length=512 is more than the model's 16 positions" in result.err
    result = midus("eval", tmp_path / "m", *args)
    assert result.code == 2
    assert "cannot be run within max_length=16" in result.err
    assert "Traceback" not in result.err


def test_a_changed_tokenizer_is_another_model(midus, tmp_path, data_dir):
    from midus.models.identity import model_id

    save_byte_model(tmp_path / "m")
    before = model_id(tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"bos_token": "<s>"', '"bos_token": "</s>"'))
    assert model_id(tmp_path / "m") != before


def test_the_type_is_the_checkpoints_where_the_config_is_silent(midus, tmp_path, data_dir):
    from midus.evaluation.evaluate import run_settings

    model, _ = save_byte_model(tmp_path / "m")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config.pop("dtype", None)
    path.write_text(json.dumps(config))
    assert run_settings(tmp_path / "m", None, None)["dtype"] == "bfloat16"


def test_an_average_with_a_variant_is_not_the_papers(midus, tmp_path, byte_model, data_dir):
    from midus.evaluation.evaluate import ModelScores, select
    from midus.evaluation.paper import PAPER
    from midus.evaluation.table import eval_document, make_lines

    tasks = "arc_easy,logiqa,winogrande,commonsense_qa,boolq,piqa"
    selection = select("general", tasks.split(","), data_dir)
    mmlu = SUITES["general"].columns[-1]
    selection.columns.append(mmlu)
    keys = [column.key for column in selection.columns]
    scores = {key: {"value": 0.5, "stderr": 0.1, "num_docs": 9} for key in keys}
    models = [ModelScores("m", "id", "float32", scores)]
    paper = list(PAPER["general"][:1])
    document = eval_document(selection, models, paper, None)
    assert document["rows"][0]["average"] == 0.5
    assert "boolq_untitled" in document["average"]["over"]
    assert document["paper"][0]["average"] is None
    average = make_lines(selection, models, paper)[-1]
    assert (average.label, average.paper) == ("Average", (None,))


def test_changed_documents_are_noticed_when_aggregating(midus, tmp_path, byte_model, data_dir):
    import lzma
    import shutil

    data = tmp_path / "data"
    shutil.copytree(data_dir / "piqa", data / "piqa")
    args = ["--data-dir", data, "--limit", 2, "--tasks", "piqa"]
    assert midus("eval", "render", byte_model, "-o", tmp_path / "r", *args).code == 0
    assert midus("eval", "score", tmp_path / "r", byte_model, "-o", tmp_path / "s").code == 0
    path = data / "piqa" / "validation.jsonl.xz"
    with lzma.open(path, "rt") as file:
        lines = file.readlines()
    with lzma.open(path, "wt") as file:
        file.writelines(lines[1:])
    result = midus("eval", "aggregate", tmp_path / "r", tmp_path / "s")
    assert result.code == 2
    assert "asks other questions than were rendered" in result.err


@pytest.mark.parametrize("command", ["score", "aggregate"])
def test_a_folder_that_was_not_rendered_is_refused(midus, tmp_path, byte_model, command):
    last = [byte_model, "-o", tmp_path / "s"] if command == "score" else [tmp_path]
    result = midus("eval", command, tmp_path, *last)
    assert result.code == 2
    assert "has no render.json; give a folder that `eval render` wrote" in result.err

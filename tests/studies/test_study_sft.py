"""Fine-tuned finalists: the runs of `midus train`, read as the study reads its own models."""

import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evaluation.benchmarks import save_byte_model, words, write_benchmarks
from small import HML, Ticks, make_study
from small_sft import SEEDS, FakeTasks, rows_of, write_rows

from midus import load_model
from midus.data.build import build_tokens
from midus.data.options import SourceOptions
from midus.errors import MidusError
from midus.studies import sft as sft_module
from midus.studies.results import read_results
from midus.studies.run import run_study
from midus.studies.sft import run_sft
from midus.studies.sft_report import make_sft_report, to_markdown
from midus.studies.timing import Deadline
from midus.training.options import read_options
from midus.training.run import train

# Of this machine and moment, and of where things lie.
CHANGING = ("seconds", "tokens_per_second", "conditions", "options")


@pytest.fixture(scope="module")
def tuned(study_folder, config):
    """All of its finalists fine-tuned, and what was said."""
    said = []
    progress = run_sft(study_folder, config, say=said.append)
    assert (progress.ran, progress.left, progress.is_out_of_time) == (7, 0, False)
    return study_folder, said


def lasting(row):
    return {key: value for key, value in row.items() if key not in CHANGING}


def run_of(folder, start, name="words"):
    """The folder of one run, by how its name begins: the digits of the model's key follow."""
    (run,) = (folder / "sft" / name).glob(f"{start}-????????")
    return run


def origin(folder, row):
    """The study's own row of the model that was fine-tuned."""
    return read_results(folder)[row["trial"]]


def test_the_base_and_every_kept_model_has_a_row(tuned):
    folder, said = tuned
    rows = rows_of(folder)
    kept = [(method, seed) for method in ("full", "hml", "lora") for seed in SEEDS]
    assert [(row["method"], row["seed"]) for row in rows] == [("untouched", None), *kept]
    assert "1 of 7: the base" in said
    assert "2 of 7: all weights, seed 100" in said
    for row in rows:
        assert row["steps"] == 5
        assert row["held_out"]["after"]["loss"] < row["held_out"]["before"]["loss"]
        assert row["seconds"] > 0
        assert origin(folder, row)["seed"] == row["seed"] or row["seed"] is None
    # All weights train, in the base and in what was merged into it as well as in the grown model.
    base, hml, lora = rows[0], rows[3], rows[5]
    assert base["trainable"] == base["parameters"] == lora["trainable"]
    assert hml["trainable"] == hml["parameters"] > base["parameters"]
    # The same rows in the same order; models of two seeds are two models.
    assert len({row["tokens"] for row in rows}) == 1
    assert len({row["held_out"]["before"]["loss"] for row in rows}) == 7


def word_perplexity(model):
    """Of the study's text by hand, in windows of its 16 tokens that do not overlap."""
    ids = torch.tensor([4 + i % 50 for i in range(200)] + [2])
    total, count = 0.0, 0
    for window in ids[: len(ids) // 16 * 16].view(-1, 16):
        logits = model(window[None]).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += 15
    return math.exp(total / count * len(ids) / 200)


@pytest.mark.parametrize("method", ["untouched", "hml"])
def test_a_row_is_what_midus_train_comes_to(tuned, config, material, tmp_path, method):
    folder, _ = tuned
    row = next(row for row in rows_of(folder) if row["method"] == method)
    source = material["base"] if method == "untouched" else folder / origin(folder, row)["model"]
    options = read_options(config, [f"model={source}", f"output={tmp_path / 'run'}"])
    options = replace(options, optimizer=options.optimizer.resolved("sft"))
    result = train(options)
    assert result.losses == {
        f"{when}_{kind}": row["held_out"][when][kind]
        for when in ("before", "after")
        for kind in ("loss", "perplexity")
    }
    assert (result.steps, result.tokens) == (row["steps"], row["tokens"])
    found = word_perplexity(load_model(result.model))
    assert row["texts"]["other"]["word_perplexity"] == pytest.approx(found, rel=1e-5)


def test_without_a_rate_every_model_reads_as_in_the_study(copied, config):
    """Whole models, deltas and merged adapters are what the study kept, read by the same means."""
    settings = ["optimizer.lr=0", "optimizer.memory_lr=0", "trainer.max_steps=1"]
    run_sft(copied, config, settings=settings, seeds=[200], name="still")
    rows = rows_of(copied, "still")
    assert [row["method"] for row in rows] == ["untouched", "full", "hml", "lora"]
    for row in rows:
        before = origin(copied, row)
        assert row["test"]["loss"] == pytest.approx(before["test"]["loss"], rel=1e-5)
        wanted = before["texts"]["other"]["word_perplexity"]
        assert row["texts"]["other"]["word_perplexity"] == pytest.approx(wanted, rel=1e-4)
        assert row["held_out"]["after"] == row["held_out"]["before"]


def test_a_run_ends_with_a_held_out_loss_whatever_the_trainer_is_told(copied, config):
    never = ["trainer.eval_strategy='no'", "trainer.max_steps=2"]
    run_sft(copied, config, settings=never, only=["untouched"])
    (row,) = rows_of(copied)
    assert row["held_out"]["after"]["loss"] < row["held_out"]["before"]["loss"]


def test_a_run_out_of_time_goes_on_to_the_same_row(tuned, copied, config, tmp_path):
    folder, _ = tuned
    some = {"only": ["hml"], "seeds": [100]}
    first = run_sft(copied, config, deadline=Deadline(4, Ticks()), **some)
    assert (first.ran, first.left, first.is_out_of_time) == (0, 1, True)
    run = run_of(copied, "hml-100")
    # It has stopped in the middle, and left nothing that looks like an end.
    (checkpoint,) = run.glob("checkpoint-*")
    assert 0 < int(checkpoint.name.split("-")[1]) < 5
    assert not (run / "model").exists()
    assert not (run / "result.json").exists()
    assert not rows_of(copied)
    spent = json.loads((checkpoint / "trainer_state.json").read_text())
    spent = spent["stateful_callbacks"]["SftCallback"]["attributes"]["seconds"]
    # It can go on elsewhere.
    moved = tmp_path / "moved"
    shutil.move(copied, moved)
    said = []
    assert run_sft(moved, config, deadline=Deadline(4, Ticks()), say=said.append, **some).ran == 1
    assert any("resuming from" in line and line.endswith(checkpoint.name) for line in said)
    (row,) = rows_of(moved)
    wanted = next(r for r in rows_of(folder) if (r["method"], r["seed"]) == ("hml", 100))
    assert lasting(row) == lasting(wanted)
    assert row["seconds"] > spent > 0


def test_a_run_that_was_killed_goes_on_to_the_same_row(tuned, copied, config, monkeypatch):
    folder, _ = tuned
    plain = sft_module.SftCallback.on_step_end

    def killed(self, args, state, control, **kwargs):
        plain(self, args, state, control, **kwargs)
        if state.global_step == 4:
            raise KeyboardInterrupt

    often = ["trainer.save_steps=2"]  # which changes no weights
    with monkeypatch.context() as patch:
        patch.setattr(sft_module.SftCallback, "on_step_end", killed)
        with pytest.raises(KeyboardInterrupt):
            run_sft(copied, config, only=["untouched"], settings=often)
    said = []
    assert run_sft(copied, config, only=["untouched"], say=said.append).ran == 1
    assert any("resuming from" in line and line.endswith("checkpoint-2") for line in said)
    assert lasting(rows_of(copied)[0]) == lasting(rows_of(folder)[0])


def test_what_has_a_row_is_not_run_again(tuned, config, monkeypatch):
    folder, _ = tuned
    out = folder / "sft" / "words"
    before = (out / "results.jsonl").read_bytes()
    monkeypatch.setattr(sft_module, "train", lambda *_, **__: pytest.fail("a run was begun"))
    # As a kill right after the row would have left it.
    left = run_of(folder, "hml-100") / "checkpoint-5"
    left.mkdir()
    assert run_sft(folder, config, deadline=Deadline(0)).ran == 0
    assert (out / "results.jsonl").read_bytes() == before
    assert not left.exists()


def test_weights_are_removed_and_figures_stay(tuned):
    folder, _ = tuned
    runs = list((folder / "sft" / "words").glob("*-100-*"))
    assert len(runs) == 3
    for run in runs:
        assert {path.name for path in run.iterdir()} == {
            "options.json", "data.json", "metrics.jsonl", "result.json", "loss.png", ".lock",
        }  # fmt: skip
    assert list((folder / "models").rglob("*.safetensors"))  # the study's own stay


def test_weights_stay_until_the_row_is_written(copied, config, monkeypatch):
    found = []

    def full_disk(out, row):
        found.extend(out.rglob("model/model.safetensors"))
        raise sft_module.NotWritten("no space")

    with monkeypatch.context() as patch:
        patch.setattr(sft_module, "add_result", full_disk)
        with pytest.raises(MidusError, match="no space"):
            run_sft(copied, config, only=["untouched"])
    assert found
    assert found[0].is_file()
    # The next call trains nothing.
    monkeypatch.setattr(
        sft_module.SftCallback, "on_step_begin", lambda *_, **__: pytest.fail("a step was made")
    )
    assert run_sft(copied, config, only=["untouched"]).ran == 1


def test_a_kept_model_is_the_fine_tuned_one(copied, config):
    run_sft(copied, config, only=["lora"], seeds=[100], keep=True)
    (row,) = rows_of(copied)
    model = load_model(copied / row["model"])
    found = word_perplexity(model)
    assert row["texts"]["other"]["word_perplexity"] == pytest.approx(found, rel=1e-5)
    weights = sorted(p.relative_to(copied) for p in (copied / "sft").rglob("*.safetensors"))
    assert weights == [Path(row["model"]) / "model.safetensors"]
    # It stays, whatever a later call says.
    assert run_sft(copied, config, only=["lora"], seeds=[100]).ran == 0
    assert (copied / row["model"]).is_dir()


def test_the_report_has_means_over_seeds_by_held_out_loss(tuned):
    folder, _ = tuned
    report = make_sft_report(folder, "words")
    losses = {}
    for row in rows_of(folder):
        losses.setdefault(row["method"], []).append(row["held_out"]["after"]["loss"])
    labels = {"untouched": "the base", "full": "all weights", "hml": "hml", "lora": "lora"}
    order = sorted(losses, key=lambda method: statistics.mean(losses[method]))
    text = to_markdown(report)
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    header, _, *lines = table
    assert [line[0] for line in lines] == [labels[method] for method in order]
    hml = dict(zip(header, lines[order.index("hml")], strict=True))
    mean, spread = statistics.mean(losses["hml"]), statistics.stdev(losses["hml"])
    assert hml["held-out loss"].endswith(f" → {mean:.4f} ± {spread:.4f}")
    assert hml["models"] == "2"
    rows = [row for row in rows_of(folder) if row["method"] == "hml"]
    was = [origin(folder, row)["texts"]["other"]["word_perplexity"] for row in rows]
    now = [row["texts"]["other"]["word_perplexity"] for row in rows]
    assert hml["other, ppl a word"] == " → ".join(
        f"{statistics.mean(v):,.2f} ± {statistics.stdev(v):,.2f}" for v in (was, now)
    )
    assert "are the same for all, and no rate was searched for any method" in text
    assert "5 steps of 4 examples and rates (at most 0.001;" in text


def test_the_report_names_what_is_left(tuned, tmp_path):
    folder, _ = tuned
    shutil.copytree(folder, tmp_path / "study")
    path = tmp_path / "study" / "sft" / "words" / "results.jsonl"
    lines = path.read_text().splitlines()
    other = {**json.loads(lines[3]), "key": "of another choice"}
    path.write_text("\n".join([*lines[:4], json.dumps(other), lines[4][:50]]))
    report = make_sft_report(tmp_path / "study", "words")
    assert report.missing == [("hml", 1), ("lora", 2)]
    text = to_markdown(report)
    assert "| hml | " in text
    assert "1 of 2" in text
    assert "- 1 rows are of models that the study has chosen no longer" in text


def test_tasks_are_of_the_fine_tuned_model_and_none_runs_twice(copied, config, monkeypatch):
    values = json.loads((copied / "study.json").read_text())
    values["study"]["tasks"] = {"names": ["piqa"], "data": "nowhere"}
    (copied / "study.json").write_text(json.dumps(values))
    monkeypatch.setattr(sft_module, "Tasks", FakeTasks)
    monkeypatch.setattr(FakeTasks, "ran", [])
    some = {"only": ["full"], "seeds": [100]}
    # Asked before the run, after each of four steps, and before each task.
    stopped = run_sft(copied, config, deadline=Deadline(7, Ticks()), **some)
    assert (stopped.left, FakeTasks.ran, rows_of(copied)) == (1, ["one"], [])
    with monkeypatch.context() as patch:
        step = "on_step_begin"
        patch.setattr(sft_module.SftCallback, step, lambda *_, **__: pytest.fail("a step"))
        assert run_sft(copied, config, **some).ran == 1
    assert FakeTasks.ran == ["one", "two"]
    (row,) = rows_of(copied)
    assert row["tasks"]["one"] == row["tasks"]["two"]
    kept = load_model(copied / origin(copied, row)["model"])
    assert row["tasks_mean"] != kept.model.norm.weight.mean().item()
    text = to_markdown(make_sft_report(copied, "words"))
    assert f"| - → {100 * row['tasks_mean']:.2f} |" in text
    assert "one, acc % | two, acc % | tasks, mean %" in text


def test_scores_without_a_rate_are_those_of_the_study(config, tmp_path):
    save_byte_model(tmp_path / "base")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": words(i, 12)}) + "\n" for i in range(80)))
    sources = [SourceOptions(path=str(text))]
    tokens = build_tokens(sources, tmp_path / "base", tmp_path / "tokens", held_out=0.2, test=0.2)
    data = write_benchmarks(tmp_path / "data", num_docs=12)
    study = make_study(
        {"base": str(tmp_path / "base"), "tokens": str(tokens.path)},
        methods={"hml": {"set": HML, "keep": True}},
        search={},
        final_seeds=[100],
        tasks={"names": ["piqa"], "data": str(data), "limit": 5, "batch_size": 4},
    )
    run_study(study, tmp_path / "study")
    settings = ["optimizer.lr=0", "optimizer.memory_lr=0", "trainer.max_steps=1"]
    run_sft(tmp_path / "study", config, settings=settings)
    rows = rows_of(tmp_path / "study")
    assert [row["method"] for row in rows] == ["untouched", "hml"]
    for row in rows:
        wanted = origin(tmp_path / "study", row)
        assert row["tasks"] == wanted["tasks"]
        assert row["tasks_of"] == wanted["tasks_of"]


def test_a_model_that_cannot_be_fine_tuned_is_left_and_the_others_run(
    midus, copied, config, monkeypatch
):
    plain = sft_module.train

    def failing(options, **kwargs):
        if "hml" in options.output:
            raise MidusError("a file is damaged")
        if "full" in options.output:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(options, **kwargs)

    monkeypatch.setattr(sft_module, "train", failing)
    told = midus("study", "sft", copied, config, "--seeds", 100)
    assert told.code == 2
    sentence = "2 models were fine-tuned and 2 could not be; the first of them is all weights, seed"
    assert sentence in told.err.replace("\n", " ")
    assert "| lora | " in told.out
    assert [row["method"] for row in rows_of(copied)] == ["untouched", "lora"]


def test_other_options_and_other_rows_are_refused_under_one_name(tuned, config, tmp_path):
    folder, _ = tuned
    with pytest.raises(MidusError, match=r"begun with optimizer.lr=0.001 and not 0.01, .*--name"):
        run_sft(folder, config, settings=["optimizer.lr=1e-2"])
    moved = write_rows(tmp_path / "moved.jsonl")
    assert run_sft(folder, config, settings=[f"data.sources={moved}"]).ran == 0
    others = write_rows(tmp_path / "others.jsonl", seed=1)
    with pytest.raises(MidusError, match=r"begun with other rows of instructions, .*--name"):
        run_sft(folder, config, settings=[f"data.sources={others}"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["stage=cpt"], r"stage='cpt' is no fine-tuning; give a file of stage sft"),
        (["upscale.method=midus"], "upscale is for a model that is to grow, .* leave it out"),
        (["control=lora"], "control is for a model that is to grow"),
        (["trainable=inserted"], "leaves the base nothing to train"),
        (["data.held_out=0"], "compared by their held-out loss; set data.held_out"),
        (["keep_best=true"], "keep_best is not for finalists, as models would end after"),
        (["early_stopping_patience=2"], "early_stopping_patience is not for finalists"),
        (["trainer.save_strategy=best"], "trainer.save_strategy is said elsewhere"),
        (["nonsense=1"], "unknown option nonsense"),
        (["trainer.max_stepz=1"], r"words.yaml: trainer.max_stepz is no .* did you mean max_steps"),
        (["batch_size=3"], "batch_size=3 is not a multiple of per_device_train_batch_size=2"),
        (["optimizer.parts.keys.lr=1"], "optimizer.parts would tune models with memories alone"),
        (
            ["optimizer.lr=null", "optimizer.relative_lr=0.03"],
            "optimizer.relative_lr would be another rate for every model",
        ),
        (["trainer.ignore_data_skip=true"], "ignore_data_skip would give a run .* other rows"),
    ],
)
def test_settings_that_would_compare_something_else_are_refused(
    study_folder, config, settings, sentence
):
    with pytest.raises(MidusError, match=sentence):
        run_sft(study_folder, config, settings=settings, name="refused")
    assert not (study_folder / "sft" / "refused").exists()


def test_what_is_no_study_or_has_kept_nothing_is_refused(finished, config, tmp_path):
    with pytest.raises(MidusError, match="holds no study"):
        run_sft(tmp_path, config)
    with pytest.raises(MidusError, match="kept no final model; set keep: true for the methods"):
        run_sft(finished[1], config)


def test_a_kept_folder_that_is_gone_is_refused(copied, config):
    row = next(r for r in read_results(copied).values() if r["method"] == "hml" and r.get("model"))
    shutil.rmtree(copied / row["model"])
    with pytest.raises(MidusError, match=rf"{row['key']}, the model of hml, seed .* is not there"):
        run_sft(copied, config)
    # Who does not ask for it is not in its way.
    assert run_sft(copied, config, only=["untouched"], settings=["trainer.max_steps=1"]).ran == 1


def test_the_command_fine_tunes_prints_and_refuses(midus, copied, config):
    some = ["--only", "untouched,full", "--seeds", "200", "--set=trainer.max_steps=2"]
    told = midus("study", "sft", copied, config, *some, "--time-limit", 0, "--name", "short")
    assert told.code == 0, told.err
    assert "stopped    time is up, 2 are left; the same command goes on" in told.out
    told = midus("study", "sft", copied, config, *some, "--name", "short")
    assert told.code == 0, told.err
    assert "| all weights |" in told.out
    assert "ran        2 models" in told.out
    report = copied / "sft" / "short" / "report.md"
    assert "- lora: 2 of the models that the study kept are left." in report.read_text()
    for arguments, sentence in (
        (["--only", "nobody"], "kept no model of method 'nobody'; choose from untouched, full,"),
        (["--only", "gone"], "kept no model of method 'gone'"),
        (["--seeds", "7"], "kept no model of seed 7; choose from 100, 200"),
        (["--seeds", "x"], "seeds='x' must be a whole number"),
        (["--seeds", ","], "seeds=',' names nothing; give one or more, or leave it out"),
        (["--only", ""], "only='' names nothing; give one or more, or leave it out"),
        (["--name", "a/b"], "name='a/b' must be the name of a folder"),
    ):
        bad = midus("study", "sft", copied, config, *arguments)
        assert bad.code == 2
        assert sentence in bad.err.replace("\n", " ")

"""Whole runs on tiny models: they learn, they resume to the bit, they refuse what is wrong."""

import json
import math
import shutil

import pytest
import torch
from runs import Crash, CrashAt, make_options
from safetensors.torch import load_file, save_file
from tiny import fill_tables, load, save_base
from transformers import TrainerCallback

from midus import (
    MemoryConfig,
    MidusError,
    UpscaleConfig,
    load_model,
    set_trainable,
    upscale,
    upscale_checkpoint,
)
from midus.models.checkpoint import is_inserted
from midus.training import run as runs_module
from midus.training.continuing import changed_option
from midus.training.options import TrainOptions
from midus.training.run import make_trainer, train
from midus.training.watching import read_metrics


def weights(run, name="model"):
    folder = run / name
    return load_file(next(folder.glob("*.safetensors"))) if name == "model" else load_file(folder)


def same(a, b):
    assert a.keys() == b.keys()
    assert a
    return [name for name in a if not torch.equal(a[name], b[name])]


def add_callback(monkeypatch, callback):
    """Gives the next runs a callback of the test's own."""
    real = runs_module.make_trainer

    def make_trainer(*args, **kwargs):
        made = real(*args, **kwargs)
        made[0].add_callback(callback)
        return made

    monkeypatch.setattr(runs_module, "make_trainer", make_trainer)


def crash_at(monkeypatch, step):
    add_callback(monkeypatch, CrashAt(step))


def test_a_run_learns_and_leaves_everything(tmp_path):
    options = make_options(tmp_path, trainer={"report_to": "tensorboard"})
    result = train(options)
    assert result.steps == 12
    assert result.tokens == 12 * 4 * 16
    assert result.losses["after_loss"] < result.losses["before_loss"]
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} >= {
        "options.json", "metrics.jsonl", "result.json", "loss.png", "model",
        "checkpoint-8", "checkpoint-12",
    }  # fmt: skip
    assert list(run.rglob("events.out.tfevents*"))
    assert not list(run.rglob("*.bin"))  # no pickled arguments
    assert json.loads((run / "options.json").read_text())["optimizer"]["lr"] == 1e-3
    rows = read_metrics(run)
    logged = next(row for row in rows if "loss" in row)
    assert {"grad_norm", "tokens_per_second", "peak_memory_gb", "lr/memory", "lr/decay"} <= set(
        logged
    )
    held_out = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in held_out] == [0, 4, 8, 12]
    assert {"slots_used/1", "slots_entropy/1", "eval_perplexity"} <= set(held_out[0])


def test_rates_are_those_of_the_step_and_the_memory_keeps_its_own(tmp_path):
    train(make_options(tmp_path, optimizer={"lr": 1e-3, "memory_lr": 2e-2}))
    rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert {row["lr/memory"] for row in rows} == {2e-2}
    warmup = math.ceil(12 * 0.1)
    expected = [
        step / warmup if step < warmup
        else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (12 - warmup)))
        for step in range(12)
    ]  # fmt: skip
    assert [row["lr/decay"] for row in rows] == pytest.approx([1e-3 * e for e in expected])


def test_the_base_is_untouched_and_the_delta_loads_everywhere(tmp_path):
    options = make_options(tmp_path)
    result = train(options)
    delta = weights(tmp_path / "run")
    base = load_file(tmp_path / "base" / "model.safetensors")
    model = load(result.model)
    assert all(is_inserted(name, model.config) for name in delta)
    assert any(t.abs().sum() > 0 for n, t in delta.items() if n.endswith("latent_values"))
    state = load_model(result.model).state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"],
                       base["model.layers.0.mlp.up_proj.weight"])  # fmt: skip
    # The loss of the loaded model is the one the run ended with.
    held_out = runs_module.prepare_text(options.data, options.model).held_out
    total, count = 0.0, 0
    for i in range(len(held_out)):
        ids = held_out[i]["input_ids"][None]
        logits = model(ids).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    assert total / count == pytest.approx(result.losses["after_loss"], rel=1e-5)


@pytest.mark.parametrize("stage", ["cpt", "sft"])
@pytest.mark.parametrize("step", [5, 8, 11])
def test_a_crashed_run_resumes_to_the_same_bits(tmp_path, monkeypatch, stage, step):
    train(make_options(tmp_path, "whole", stage))
    with monkeypatch.context() as patch:
        crash_at(patch, step)
        with pytest.raises(Crash):
            train(make_options(tmp_path, "broken", stage))
    assert not (tmp_path / "broken" / "model").exists()
    torch.manual_seed(123)  # what the process did before must not matter
    train(make_options(tmp_path, "broken", stage), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken")) == []
    for state in ("checkpoint-12/optimizer.safetensors",):
        assert same(weights(tmp_path / "whole", state), weights(tmp_path / "broken", state)) == []
    losses = [
        [(row["step"], row["loss"]) for row in read_metrics(tmp_path / name) if "loss" in row]
        for name in ("whole", "broken")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", ["cpt", "sft"])
def test_resuming_a_finished_run_changes_nothing(tmp_path, stage):
    options = make_options(tmp_path, stage=stage)
    result = train(options)
    before = weights(tmp_path / "run")
    written = (result.model / "config.json").stat().st_mtime_ns
    again = train(options, resume=True)
    assert (again.steps, again.tokens, again.losses) == (12, result.tokens, result.losses)
    assert (result.model / "config.json").stat().st_mtime_ns == written
    # Killed after the last step and before the model was there.
    shutil.rmtree(result.model)
    assert train(options, resume=True).steps == 12
    assert same(before, weights(tmp_path / "run")) == []
    assert not (tmp_path / "run" / "checkpoint-13").exists()


def test_a_finished_lora_run_resumes(tmp_path):
    options = make_options(tmp_path, control="lora")
    result = train(options)
    before = weights(tmp_path / "run")
    train(options, resume=True)
    shutil.rmtree(result.model)
    train(options, resume=True)
    assert same(before, weights(tmp_path / "run")) == []


def stopping(tmp_path, name):
    """A run that stops early: at these rates nothing gets better."""
    return make_options(
        tmp_path, name, early_stopping_patience=3, optimizer={"lr": 0.0, "memory_lr": 0.0},
        trainer={"max_steps": 40, "save_steps": 2},
    )  # fmt: skip


def test_early_stopping_goes_on_counting_after_a_crash(tmp_path, monkeypatch):
    whole = train(stopping(tmp_path, "whole"))
    assert whole.steps < 40
    with monkeypatch.context() as patch:
        crash_at(patch, whole.steps - 3)
        with pytest.raises(Crash):
            train(stopping(tmp_path, "broken"))
    assert train(stopping(tmp_path, "broken"), resume=True).steps == whole.steps
    shutil.rmtree(tmp_path / "broken" / "model")
    assert train(stopping(tmp_path, "broken"), resume=True).steps == whole.steps


def test_a_trained_base_is_never_left_out_of_a_checkpoint(tmp_path):
    tuned = train(make_options(tmp_path, "tuned", "sft", optimizer={"lr": 1e-3}))
    onward = make_options(tmp_path, "onward", model=str(tuned.model), upscale=None)
    result = train(onward)
    assert not (result.model / "delta.safetensors").exists()
    a, b = load_model(tuned.model).state_dict(), load_model(result.model).state_dict()
    changed = {name for name in a if not torch.equal(a[name], b[name])}
    assert changed
    assert all(is_inserted(name, load_model(tuned.model).config) for name in changed)


@pytest.mark.parametrize("delta", [True, False])
def test_a_grown_checkpoint_goes_on_as_a_delta_of_its_base(tmp_path, delta):
    make_options(tmp_path)
    grown = tmp_path / "grown"
    config = UpscaleConfig(memory=MemoryConfig(num_subkeys=8))
    upscale_checkpoint(tmp_path / "base", grown, config, delta=delta)
    result = train(make_options(tmp_path, model=str(grown), upscale=None))
    assert (result.model / "delta.safetensors").is_file()
    assert read_record(result.model) == read_record(grown) | {"is_delta": True}


def read_record(folder):
    return json.loads((folder / "midus.json").read_text())


def test_results_have_the_type_and_settings_of_what_they_came_from(tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    for stage, name in (("cpt", "delta.safetensors"), ("sft", "model.safetensors")):
        result = train(make_options(tmp_path, stage, stage))
        assert {t.dtype for t in load_file(result.model / name).values()} == {torch.bfloat16}
        config = json.loads((result.model / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        assert config["use_cache"] == base.config.use_cache
        assert load(result.model, dtype="auto").dtype == torch.bfloat16
        # While it trains it is float32.
        kept = load_file(tmp_path / stage / "checkpoint-12" / name)
        assert torch.float32 in {tensor.dtype for tensor in kept.values()}


def test_the_name_of_the_base_is_recorded_and_not_its_place(tmp_path, monkeypatch):
    options = make_options(tmp_path)
    record = read_record(train(options).model)["base_model"]
    assert record["id"] == options.model
    assert record["fingerprint"].startswith("sha256")
    assert record["licence"] == {"license": "mit"}


def test_checkpoints_of_other_numbers_of_processes_are_refused(tmp_path):
    train(make_options(tmp_path))
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoint-12")
    path = tmp_path / "run" / "checkpoint-8" / "scheduler.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world_size": 2}))
    with pytest.raises(MidusError, match="saved by 2 processes and this run has 1"):
        train(make_options(tmp_path), resume=True)


def test_what_does_not_change_the_weights_may_change(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        crash_at(patch, 9)
        with pytest.raises(Crash):
            train(make_options(tmp_path))
    (tmp_path / "run" / "options.json").read_text()
    options = make_options(tmp_path, trainer={"eval_steps": 2, "save_steps": 5, "logging_steps": 3})
    assert train(options, resume=True).steps == 12


def test_options_that_cannot_be_read_are_one_sentence(tmp_path):
    train(make_options(tmp_path))
    (tmp_path / "run" / "options.json").write_text("")
    with pytest.raises(MidusError, match=r"options\.json cannot be read"):
        train(make_options(tmp_path), resume=True)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_gradient_that_is_none_stops_the_run(tmp_path, monkeypatch, clip):
    class Inf(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 6:
                parameter = next(p for p in model.parameters() if p.requires_grad)
                parameter.register_hook(lambda grad: torch.full_like(grad, math.inf))

    add_callback(monkeypatch, Inf())
    with pytest.raises(MidusError, match=r"gradient norm is (inf|nan) at step 7.*checkpoint-4"):
        train(make_options(tmp_path, trainer={"max_grad_norm": clip}))


def test_a_held_out_loss_that_is_none_is_one_sentence(tmp_path):
    make_options(tmp_path)
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(MidusError, match="held-out loss is nan at step 0"):
        train(make_options(tmp_path))


@pytest.mark.parametrize(
    ("changed", "is_warned"),
    [
        ({"upscale": {"positions": [0, 3], "memory": {"num_subkeys": 8}}}, True),
        ({"upscale": {"positions": [1, 3], "memory": {"num_subkeys": 8}}}, False),
        (
            {
                "upscale": {"positions": [0, 3], "memory": {"num_subkeys": 8}},
                "optimizer": {"recipe": "paper"},
            },
            False,
        ),
    ],
    ids=["before", "after", "slow"],
)
def test_a_memory_block_before_the_first_one_is_warned_of_at_high_rates(
    tmp_path, changed, is_warned
):
    said = []
    runs_module.make_trainer(make_options(tmp_path, **changed), say=said.append)
    warnings = [line for line in said if "before the base's first block" in line]
    assert len(warnings) == is_warned


def test_running_statistics_and_recomputation_exclude_each_other(tmp_path):
    memory = {"num_subkeys": 8, "query_norm": "batch"}
    with pytest.raises(MidusError, match="count its statistics twice"):
        train(make_options(tmp_path, upscale={"memory": memory},
                           trainer={"gradient_checkpointing": True}))  # fmt: skip


def test_recomputation_changes_nothing(tmp_path):
    runs = [
        train(make_options(tmp_path, f"gc-{on}", precision="float64", optimizer={"lr": 1e-3},
                           trainer={"gradient_checkpointing": on, "max_steps": 4}))
        for on in (False, True)
    ]  # fmt: skip
    a, b = (load_file(run.model / "delta.safetensors") for run in runs)
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-12


def test_no_more_text_is_tokenised_than_the_steps_read(tmp_path):
    train(make_options(tmp_path, trainer={"max_steps": 4}))
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    stored = json.loads(manifest.read_text())["splits"]["train"]["tokens"]
    assert 4 * 4 * 16 <= stored <= 4 * 4 * 16 + 2 * 16


def test_tokens_are_counted_as_they_are_read(tmp_path):
    # 13 sequences in steps of 4 by micro-batches of 2: three whole steps, no fourth of one.
    options = make_options(tmp_path, data={**make_options(tmp_path).to_dict()["data"],
                                           "max_tokens": 13 * 16},
                           trainer={"max_steps": -1, "num_train_epochs": 2})  # fmt: skip
    result = train(options)
    micro_batches = 13 // 2
    assert result.tokens == 2 * micro_batches * 2 * 16


def test_resume_without_a_checkpoint_begins(tmp_path):
    assert train(make_options(tmp_path), resume=True).steps == 12


def test_a_finished_run_is_not_overwritten(tmp_path):
    train(make_options(tmp_path))
    with pytest.raises(MidusError, match="holds a run already"):
        train(make_options(tmp_path))


def test_resume_with_other_options_is_refused(tmp_path):
    train(make_options(tmp_path))
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(MidusError, match=r"begun with optimizer\.lr=0\.001 and not 0\.5"):
        train(make_options(tmp_path, optimizer={"recipe": "short", "lr": 0.5}), resume=True)


def test_a_run_begun_before_the_bypass_resumes_without_one(tmp_path):
    train(make_options(tmp_path))
    path = tmp_path / "run" / "options.json"
    saved = json.loads(path.read_text())
    assert saved["upscale"]["memory"].pop("bypass") == "none"
    path.write_text(json.dumps(saved))
    assert train(make_options(tmp_path), resume=True).steps == 12


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.matrices",
        "optimizer.parts.keys.by_stream",
        "optimizer.parts.keys.for_steps",
        "upscale.memory.memory_output_proj",
        "key_start",
        "cuda_graphs",
    ],
)
def test_a_run_begun_before_an_option_goes_on_with_its_default(tmp_path, name):
    options = make_options(
        tmp_path, optimizer={"recipe": "short", "parts": {"keys": {"lr": 1e-3}}}
    ).to_dict()
    saved = json.loads(json.dumps(options))
    *path, last = name.split(".")
    place = saved
    for part in path:
        place = place[part]
    del place[last]
    assert changed_option(saved, options) is None
    place[last] = "another"
    if name != "cuda_graphs":  # how steps are launched is free to change
        assert changed_option(saved, options)[0] == name


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_a_part_that_nothing_is_of_is_said(tmp_path, matrices):
    parts = {"bypass": {"lr": 0.3}, "keys": {"lr": 1e-3}, "attention": {"lr": 1e-3}}
    said = []
    make_trainer(
        make_options(tmp_path, optimizer={"parts": parts, "matrices": matrices}), say=said.append
    )
    notes = [line for line in said if "has no effect" in line]
    assert notes == [
        "note: optimizer.parts.bypass has no effect, since nothing of that name trains"
    ]


def test_a_home_folder_is_one_folder_for_all(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = make_options(tmp_path)
    own = TrainOptions.from_dict({**options.to_dict(), "output": "~/mine"})
    assert own.output == str(tmp_path / "mine")
    with pytest.raises(MidusError, match="output='~nobody-here/run' names no user's home"):
        TrainOptions.from_dict({**options.to_dict(), "output": "~nobody-here/run"})


def test_a_finished_model_without_a_checkpoint_is_not_trained_again(tmp_path):
    options = {"trainer": {"save_strategy": "no", "max_steps": 2}}
    train(make_options(tmp_path, **options), resume=True)
    before = load_file(tmp_path / "run" / "model" / "delta.safetensors")
    with pytest.raises(MidusError, match="holds a finished model and no checkpoint to go on from"):
        train(make_options(tmp_path, **options), resume=True)
    other = make_options(tmp_path, optimizer={"recipe": "short", "lr": 0.5}, **options)
    with pytest.raises(MidusError, match=r"begun with optimizer\.lr"):
        train(other, resume=True)
    assert same(before, load_file(tmp_path / "run" / "model" / "delta.safetensors")) == []


@pytest.mark.parametrize("stage", ["cpt", "sft"])
def test_other_data_is_no_continuation(tmp_path, stage):
    options = make_options(tmp_path, stage=stage)
    with pytest.raises(Crash):
        train(options, callbacks=[CrashAt(6)])
    data = tmp_path / f"{stage}.jsonl"
    before = data.read_text()
    data.write_text(before.replace("w7", "w8"))
    with pytest.raises(MidusError, match="was begun with other data: a source has changed since"):
        train(options, resume=True)
    data.write_text(before)
    assert train(options, resume=True).steps == 12


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    class Second(TrainerCallback):
        refused = 0

        def on_step_end(self, args, state, control, **kwargs):
            with pytest.raises(MidusError, match="is in use by another midus train"):
                train(make_options(tmp_path), resume=True)
            Second.refused += 1

    options = make_options(tmp_path, trainer={"max_steps": 2})
    train(options, callbacks=[Second()])
    assert Second.refused == 2
    train(options, resume=True)  # and free afterwards


def test_a_run_begun_before_fused_blocks_had_none(tmp_path):
    options = make_options(tmp_path).to_dict()
    saved = {key: value for key, value in options.items() if key != "fused_blocks"}
    assert changed_option(saved, options) == ("fused_blocks", False, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": {"parts": {"values": {"by_stream": True}}}, "stage": "sft"}, "by_stream in"),
        ({"key_start": "queries", "stage": "sft"}, "key_start='queries' is for stage cpt"),
        ({"key_start": "queries", "upscale": {"method": "llama_pro"}}, "needs memory layers with"),
        ({"upscale": {"num_inserted": 99}}, "num_inserted=99"),
        ({"data": {"sources": ["x"], "seq_len": 4096}}, "data.seq_len=4096 is more than the model"),
        ({"load_in_4bit": True, "control": "last_layers"}, "which load_in_4bit packs"),
        ({"load_in_4bit": True, "upscale": {"method": "llama_pro"}}, "load_in_4bit trains memory"),
        ({"load_in_4bit": True, "upscale": None}, "load_in_4bit trains memory blocks beside"),
    ],
)
def test_what_cannot_be_is_refused_before_texts_are_read(tmp_path, monkeypatch, values, message):
    options = make_options(tmp_path, **values)
    monkeypatch.setattr(runs_module, "_data", lambda *_: pytest.fail("texts were read"))
    with pytest.raises(MidusError, match=message):
        train(options)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"max_steps": None}, "trainer.max_steps=None"),
        ({"max_steps": "100"}, "trainer.max_steps='100'"),
        ({"max_steps": float("inf")}, "trainer.max_steps=inf"),
        ({"max_steps": -1, "num_train_epochs": 0}, "trainer.num_train_epochs=0 must be a number"),
        ({"max_steps": -1, "num_train_epochs": -2}, "trainer.num_train_epochs=-2 must be a number"),
        ({"eval_strategy": "no"}, "waits for evaluations, and trainer.eval_strategy='no' has none"),
    ],
)
def test_arguments_that_make_no_run_are_refused(tmp_path, trainer, message):
    with pytest.raises(MidusError, match=message):
        train(make_options(tmp_path, trainer=trainer, early_stopping_patience=2))


def test_a_half_written_checkpoint_is_never_taken(tmp_path, monkeypatch):
    whole = train(make_options(tmp_path, "whole"))
    from midus.training import trainer as trainer_module

    real = trainer_module.publish

    def publish(target):
        if target.name == "checkpoint-8":
            raise Crash
        real(target)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "publish", publish)
        with pytest.raises(Crash):
            train(make_options(tmp_path, "broken"))
    left = [path.name for path in (tmp_path / "broken").iterdir()]
    assert ".checkpoint-8.saving" in left
    assert "checkpoint-8" not in left
    again = train(make_options(tmp_path, "broken"), resume=True)
    assert ".checkpoint-8.saving" not in [p.name for p in (tmp_path / "broken").iterdir()]
    assert same(load_file(whole.model / "delta.safetensors"),
                load_file(again.model / "delta.safetensors")) == []  # fmt: skip


def test_accumulation_changes_nothing(tmp_path):
    runs = [
        train(make_options(tmp_path, f"by-{size}", precision="float64", batch_size=8,
                           trainer={"per_device_train_batch_size": size, "max_steps": 6}))
        for size in (8, 1)
    ]  # fmt: skip
    a, b = (load_file(run.model / "delta.safetensors") for run in runs)
    assert a["model.layers.1.memory.values.latent_values"].dtype == torch.float64
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-8


class Poison(TrainerCallback):
    """Makes a trained weight NaN before a step."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 6:
            next(p for p in model.parameters() if p.requires_grad).data.fill_(math.nan)


def test_nan_stops_the_run_and_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    add_callback(monkeypatch, Poison())
    with pytest.raises(MidusError, match=r"loss is nan at step 7.*checkpoint-4"):
        train(make_options(tmp_path))
    assert not (tmp_path / "run" / "model").exists()


def test_a_full_disk_is_one_sentence_and_keeps_what_was_saved(tmp_path, monkeypatch):
    from midus.training import optimizer_state, trainer

    real = optimizer_state.save_file
    saved = []

    def save_file(tensors, path, header):
        saved.append(path)
        if len(saved) == 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path, header)

    monkeypatch.setattr(optimizer_state, "save_file", save_file)
    assert trainer.save_optimizer is optimizer_state.save_optimizer
    with pytest.raises(MidusError, match=r"No space left.*last good checkpoint is .*checkpoint-4"):
        train(make_options(tmp_path))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "checkpoint-4" in names
    assert not any("checkpoint-8" in name for name in names)


def test_best_checkpoint_is_kept_and_taken(tmp_path):
    # A rate this high makes it worse after a while.
    options = make_options(
        tmp_path, keep_best=True, optimizer={"lr": 1e-3, "memory_lr": 1.0},
        trainer={"max_steps": 16, "eval_steps": 1, "save_steps": 8, "save_total_limit": 1},
    )  # fmt: skip
    result = train(options)
    rows = {r["step"]: r["eval_loss"] for r in read_metrics(tmp_path / "run") if "eval_loss" in r}
    best = min((s for s in rows if s), key=rows.get)
    assert result.losses["after_loss"] == rows[best]
    kept = weights(tmp_path / "run", f"checkpoint-{best}/delta.safetensors")
    assert same(weights(tmp_path / "run"), kept) == []


def test_fine_tuning_masks_prompts(tmp_path):
    options = make_options(tmp_path, stage="sft")
    trainer, start = runs_module.make_trainer(options)
    assert start.trainable == "all"
    batch = next(iter(trainer.get_train_dataloader()))
    labels, ids = batch["labels"], batch["input_ids"]
    for row in range(len(labels)):
        kept = labels[row] != -100
        assert kept.sum() == 3  # two words and the end
        assert ids[row][kept][-1] == 2
        assert torch.equal(labels[row][kept], ids[row][kept])
        assert not kept[:3].any()  # the prompt


def test_fine_tuning_writes_a_full_checkpoint_that_learned(tmp_path):
    result = train(make_options(tmp_path, stage="sft", optimizer={"lr": 1e-3},
                                trainer={"max_steps": 30}))  # fmt: skip
    assert result.losses["after_loss"] < result.losses["before_loss"]
    assert (result.model / "model.safetensors").is_file()
    assert load_model(result.model).config.memory_positions


@pytest.mark.parametrize("control", ["lora", "last_layers"])
def test_controls_train_and_resume(tmp_path, monkeypatch, control):
    train(make_options(tmp_path, "whole", control=control))
    with monkeypatch.context() as patch:
        crash_at(patch, 6)
        with pytest.raises(Crash):
            train(make_options(tmp_path, "broken", control=control))
    train(make_options(tmp_path, "broken", control=control), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken")) == []


@pytest.mark.parametrize("method", ["llama_pro", "base"])
def test_other_methods_train_too(tmp_path, method):
    result = train(make_options(tmp_path, upscale={"method": method}))
    kind = "delta.safetensors" if method == "llama_pro" else "model.safetensors"
    assert (result.model / kind).is_file()
    assert result.losses["after_loss"] < result.losses["before_loss"]


@pytest.mark.parametrize("precision", ["mixed", "pure_bf16", "float32"])
def test_precisions_decide_the_types_of_trained_and_frozen_weights(tmp_path, precision):
    options = make_options(tmp_path, precision=precision, trainer={"max_steps": 4})
    trainer, start = runs_module.make_trainer(options)
    types = {p.dtype for p in start.model.parameters() if p.requires_grad}
    assert types == {torch.bfloat16 if precision == "pure_bf16" else torch.float32}
    trainer.train()
    moments = {v.dtype for s in trainer.optimizer.state.values() for k, v in s.items()
               if k != "step"}  # fmt: skip
    assert moments == types


def assert_gradients_of_the_unpacked_model(trainer, model):
    """After an evaluation, too, gradients are those of the model with its weights unpacked."""
    from bitsandbytes.functional import dequantize_4bit

    plain = load_model(trainer.args.output_dir.replace("run", "base"))
    plain = upscale(plain, UpscaleConfig(memory=MemoryConfig(num_subkeys=8)))
    own = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        held = own[name]
        value = dequantize_4bit(held.data, held.quant_state) if held.dtype == torch.uint8 else held
        parameter.data = value.detach().float()
    # Tables that speak, or the blocks below would hear nothing of each other.
    for some in (model, plain):
        fill_tables(some, scale=0.1)
        set_trainable(some, "inserted")
    ids = trainer.train_dataset[0]["input_ids"][None]
    model.eval()
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    model.train()
    for some in (model, plain):
        some(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None and name.startswith("model.layers.1."):
            a, b = own[name].grad.float().flatten(), parameter.grad.flatten()
            # bfloat16 picks another slot now and then; a cut path would leave nothing of it.
            assert torch.cosine_similarity(a, b, dim=0) > 0.9, name


def test_a_base_in_4_bits_trains_its_inserted_blocks(tmp_path):
    # Widths that bitsandbytes' blocks of 64 divide.
    save_base(tmp_path / "base", hidden_size=128, intermediate_size=256, head_dim=32)
    options = make_options(tmp_path, load_in_4bit=True, trainer={"max_steps": 20})
    trainer, start = runs_module.make_trainer(options)
    packed = {name for name, p in start.model.named_parameters() if p.dtype == torch.uint8}
    assert "model.layers.0.mlp.up_proj.weight" in packed
    assert not any(is_inserted(name, start.model.config) for name in packed)
    assert_gradients_of_the_unpacked_model(trainer, start.model)
    result = train(options)
    delta = weights(tmp_path / "run")
    assert all(is_inserted(name, start.model.config) for name in delta)
    assert delta["model.layers.1.memory.values.latent_values"].abs().sum() > 0
    # The delta goes with the unquantized base, too.
    model = load(result.model)
    assert not hasattr(model.config, "quantization_config")
    assert model.dtype == torch.float32


def test_too_little_data_is_refused(tmp_path):
    with pytest.raises(MidusError, match="fewer than batch_size=4096"):
        train(make_options(tmp_path, batch_size=4096))


def test_unknown_trainer_arguments_are_refused_with_a_hint(tmp_path):
    with pytest.raises(MidusError, match=r"trainer\.max_step is no argument .* max_steps\?"):
        train(make_options(tmp_path, trainer={"max_step": 3}))


def test_batch_that_does_not_divide_is_refused(tmp_path):
    with pytest.raises(MidusError, match="not a multiple"):
        train(make_options(tmp_path, trainer={"per_device_train_batch_size": 3}))

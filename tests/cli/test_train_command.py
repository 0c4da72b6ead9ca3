"""`midus train` as a user types it."""

import re
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from runs import make_options

from midus.training.accelerate import settings_file


@pytest.fixture
def file(tmp_path):
    options = make_options(tmp_path, trainer={"max_steps": 4}).to_dict()
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def test_dry_run_prints_options_groups_and_steps(midus, file, tmp_path):
    result = midus("train", file, "--dry-run", "--set", "optimizer.memory_lr=0.02")
    assert result.code == 0, result.err
    assert "memory_lr: 0.02" in result.out
    assert "stage: cpt" in result.out
    for word in ("decay", "no_decay", "memory", "constant", "cosine"):
        assert word in result.out
    assert "4 steps, at most 256 tokens" in result.out
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()  # no data is read either


def test_dry_run_says_what_a_rate_goes_with(midus, file):
    parts = "optimizer.parts={values: {relative_lr: 0.16, by_stream: true}}"
    out = midus("train", file, "--dry-run", "--set", parts).out
    assert re.search(r"values .*0\.16 x weights, by stream", out)
    out = midus("train", file, "--dry-run", "--set", "optimizer.matrices=muon").out
    assert re.search(r"matrices .*0\.001, muon", out), out


def test_whole_numbers_may_be_written_as_floats(midus, file):
    result = midus("train", file, "--dry-run", "--set", "trainer.max_steps=1e2")
    assert result.code == 0, result.err
    assert "100 steps" in result.out


def test_dry_run_refuses_what_the_run_would(midus, file):
    result = midus(
        "train", file, "--dry-run", "--set", "keep_best=true", "--set", "data.held_out=0"
    )
    assert result.code == 2
    assert "need held-out data" in result.err


@pytest.mark.parametrize("override", ["trainer.run_name=2024-01-01", "trainer={1: 2}"])
def test_values_that_no_trainer_takes_are_one_sentence(midus, file, override):
    result = midus("train", file, "--set", override)
    assert result.code == 2
    assert result.err.startswith("midus: ")
    assert "Traceback" not in result.err


def test_training_prints_what_it_came_to(midus, file, tmp_path):
    result = midus("train", file)
    assert result.code == 0, result.err
    assert "held-out   perplexity" in result.out
    assert "steps      4 (256 tokens)" in result.out
    assert str(tmp_path / "run" / "model") in result.out
    assert "parameters train" in result.err
    assert "step 4 of 4" in result.err


def test_the_options_a_run_saved_make_the_same_run(midus, file, tmp_path):
    assert midus("train", file).code == 0
    saved = tmp_path / "run" / "options.json"  # JSON is YAML
    again = midus("train", saved, "--set", f"output={tmp_path / 'again'}")
    assert again.code == 0, again.err
    a, b = (tmp_path / run / "model" / "delta.safetensors" for run in ("run", "again"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "stage=rlhf"], "stage='rlhf' is unknown"),
        (["--set", "model=/nowhere"], "/nowhere does not exist"),
        (["--set", "data.sources=[/nowhere.jsonl]"], "nowhere.jsonl"),
        (["--set", "trainer.max_stepz=3"], "did you mean max_steps?"),
        (["--set", "upscale.num_inserted=0"], "num_inserted=0"),
        (["--set", "batch_size=100000"], "fewer than batch_size=100000"),
        (["--set", "trainer.num_train_epochs=no"], "num_train_epochs"),
        (["--set", "trainer.logging_steps=often"], "logging_steps"),
        (["--set", "attention=nonsense"], "nonsense"),
        (["--set", "trainer.optim=sgdd"], "sgdd"),
        (["--set", "keep_best=true", "--set", "data.held_out=0"], "need held-out data"),
        (["--set", "stage=sft"], "bad rows"),
        (["--set", "trainer.per_device_train_batch_size=0"], "must be at least 1"),
        (["--set", "trainer.dataloader_num_workers=-1"], "must be at least 0"),
        (["--set", "trainer.report_to=wandb"], "wandb"),
    ],
)
def test_bad_input_is_one_sentence(midus, file, arguments, message):
    result = midus("train", file, *arguments)
    assert result.code == 2, result.err
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_missing_file_is_one_sentence(midus, tmp_path):
    result = midus("train", tmp_path / "none.yaml")
    assert result.code == 2
    assert "none.yaml cannot be read" in result.err


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_packaged_settings_are_what_accelerate_reads(name):
    from accelerate.commands.config.config_args import load_config_from_file

    settings = load_config_from_file(str(settings_file(name)))
    assert settings.num_processes == 8
    assert str(settings.distributed_type).endswith("FSDP" if name == "fsdp2" else "MULTI_GPU")

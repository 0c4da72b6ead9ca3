"""Deltas merged for servers: once, whole, and only with their own base."""

import json
import os
import shutil

import pytest
import torch
from tiny import MEMORY, fill_tables, load, prompt_ids, save_base

from midus import MidusError, UpscaleConfig, load_model
from midus.models.configuration import read_config
from midus.models.identity import model_id
from midus.serving import merged
from midus.serving.merged import whole_model
from midus.upscaling import upscale_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path):
    save_base(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def delta(base, tmp_path):
    config = UpscaleConfig(memory=MEMORY)
    upscale_checkpoint(base, tmp_path / "fresh", config, delta=True)
    fill_tables(load_model(tmp_path / "fresh")).save_pretrained(tmp_path / "delta", delta=True)
    return tmp_path / "delta"


def logits(folder):
    with torch.no_grad():
        return load(folder)(prompt_ids()).logits


def test_a_delta_becomes_a_whole_model_in_the_cache(delta, cache):
    served = whole_model(delta)
    assert served.is_delta
    assert not served.is_reused
    assert served.folder == cache / "merged" / f"delta-{model_id(delta)}"
    assert not read_config(served.folder).is_delta
    assert torch.equal(logits(served.folder), logits(delta))
    assert (served.folder / "tokenizer.json").is_file()
    assert [path.name for path in served.folder.parent.iterdir()] == [served.folder.name]


def test_the_second_use_writes_nothing_and_needs_no_base(delta, base, monkeypatch):
    first = whole_model(delta)
    before = {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    shutil.rmtree(base)
    monkeypatch.setattr(merged, "merge_delta", lambda *_, **__: pytest.fail("merged again"))
    second = whole_model(delta)
    assert second.folder == first.folder
    assert second.is_reused
    assert before == {path.name: path.stat().st_mtime_ns for path in second.folder.iterdir()}


def test_a_changed_delta_is_merged_anew(delta):
    first = whole_model(delta)
    fill_tables(load_model(delta), seed=9).save_pretrained(delta, delta=True)
    second = whole_model(delta)
    assert second.folder != first.folder
    assert not second.is_reused
    assert not torch.equal(logits(second.folder), logits(first.folder))


@pytest.mark.parametrize("is_merged", [False, True])
def test_another_base_is_refused(delta, tmp_path, is_merged, cache):
    save_base(tmp_path / "other", seed=5)
    if is_merged:
        whole_model(delta)
    with pytest.raises(MidusError, match="is not the base of this model"):
        whole_model(delta, tmp_path / "other")
    assert len(list(cache.glob("merged/*"))) == is_merged


def test_a_moved_base_is_taken_from_where_it_is(delta, base, tmp_path):
    base.rename(tmp_path / "moved")
    served = whole_model(delta, tmp_path / "moved")
    assert not served.is_reused
    assert whole_model(delta, tmp_path / "moved").is_reused


def test_a_merge_that_is_cut_off_leaves_no_copy(delta, cache, monkeypatch):
    def fail(*args):
        raise MidusError("cut off")

    monkeypatch.setattr("midus.upscaling.stored.write_surroundings", fail)
    with pytest.raises(MidusError, match="cut off"):
        whole_model(delta)
    assert os.listdir(cache / "merged") == []
    monkeypatch.undo()
    monkeypatch.setenv("MIDUS_CACHE", str(cache))
    assert not whole_model(delta).is_reused


def test_copied_blocks_are_merged_to_plain_models(base, tmp_path):
    config = UpscaleConfig(method="llama_pro", num_inserted=2)
    upscale_checkpoint(base, tmp_path / "pro", config, delta=True)
    served = whole_model(tmp_path / "pro")
    values = json.loads((served.folder / "config.json").read_text())
    assert values["model_type"] == "llama"
    assert values["num_hidden_layers"] == 6
    assert torch.equal(logits(served.folder), logits(base))


def test_a_full_checkpoint_is_served_where_it_is(base, cache):
    served = whole_model(base)
    assert served.folder == base
    assert not served.is_delta
    assert not cache.exists()


def test_a_base_for_a_full_checkpoint_is_refused(base):
    with pytest.raises(MidusError, match="is no delta; leave it out"):
        whole_model(base, base)


def test_a_delta_of_an_unknown_base_is_refused(delta):
    path = delta / "config.json"
    values = json.loads(path.read_text())
    del values["base_model"]["fingerprint"]
    path.write_text(json.dumps(values))
    with pytest.raises(MidusError, match="does not record its base's fingerprint"):
        whole_model(delta)

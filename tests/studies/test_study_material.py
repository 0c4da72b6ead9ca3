"""What trials share: nothing changes it, and everything that decides a result identifies it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import HML, make_study

from midus.errors import MidusError
from midus.studies.grid import search_trials
from midus.studies.loop import Loop
from midus.studies.material import Material


def test_no_trial_changes_the_base(material):
    shared = Material(material["base"], material["tokens"], {})
    before = {name: t.clone() for name, t in shared.base.state_dict().items()}
    methods = {"full": {}, "hml": {"set": {**HML, "trainable": "all"}}}
    for trial in search_trials(make_study(material, methods=methods, search={})):
        data = shared.sequences("train", 16, 512)
        loop = Loop(shared.start(trial.options), trial.options, data)
        loop.step()
        loop.step()
    after = shared.base.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_slow_growth_is_done_once(material, monkeypatch, tmp_path):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path))
    upscale = {"method": "lesa", "lesa_epochs": 1}
    study = make_study(material, methods={"lesa": {"set": {"upscale": upscale}}})
    first, second = search_trials(study)
    shared = Material(material["base"], material["tokens"], {})
    grown = shared.start(first.options).state_dict()
    monkeypatch.setattr(
        "midus.studies.material.upscale_checkpoint", lambda *_, **__: pytest.fail("grown again")
    )
    again = shared.start(second.options).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in grown.items())


def change_config(base, **values):
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weight(base):
    path = base / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][3, 5] += 1  # a row that no sample takes
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (lambda base: None, True),
        (lambda base: change_config(base, _name_or_path="x", transformers_version="9"), True),
        (lambda base: change_config(base, rms_norm_eps=1e-3), False),
        (change_weight, False),
    ],
    ids=["moved", "renamed", "another norm", "one weight"],
)
def test_a_base_is_known_by_all_that_it_computes(material, tmp_path, change, is_same):
    base = tmp_path / "base"
    shutil.copytree(material["base"], base)
    change(base)
    mine = Material(str(base), material["tokens"], {}).identity
    assert (mine == Material(material["base"], material["tokens"], {}).identity) is is_same


def test_tokens_of_another_tokenizer_are_refused(material, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(material["base"], base)
    path = base / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"w700"'))
    with pytest.raises(MidusError, match=r"was made with the tokenizer of .* build it again with"):
        Material(str(base), material["tokens"], {})


def test_a_text_without_words_is_refused(material, tmp_path):
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(MidusError, match=r"empty.txt holds no words"):
        Material(material["base"], material["tokens"], {"empty": str(tmp_path / "empty.txt")})

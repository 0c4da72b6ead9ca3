"""Which folder an analysis goes to."""

import json

import pytest
from tiny import save_base

from midus.cli.analysis_folder import analysis_folder, analysis_name
from midus.errors import MidusError
from midus.models.identity import model_id


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("runs/x/model", "x"),
        ("runs/x/model/", "x"),
        ("runs/x/checkpoint-100", "x-checkpoint-100"),
        ("runs/x", "x"),
        ("org/model", "model"),  # of the hub: no folder here
        ("smollm2-135m", "smollm2-135m"),
    ],
)
def test_a_model_is_named_by_its_run(tmp_path, monkeypatch, model, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "checkpoint-100"):
        (tmp_path / "runs" / "x" / folder).mkdir(parents=True)
    assert analysis_name(model) == name


def test_another_models_result_is_not_replaced_unless_the_folder_was_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "a" / "x" / "model")
    save_base(tmp_path / "b" / "x" / "model", num_hidden_layers=2)
    one, other = "a/x/model", "b/x/model"
    folder = analysis_folder("heads", one, None)
    assert str(folder) == "analysis/x"
    folder.mkdir(parents=True)
    (folder / "heads.json").write_text(json.dumps({"model_id": model_id(one)}))
    assert analysis_folder("heads", one, None) == folder
    assert analysis_folder("slots", other, None) == folder
    assert analysis_folder("heads", other, folder) == folder
    with pytest.raises(MidusError, match=r"heads\.json is about another model .* --output"):
        analysis_folder("heads", other, None)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_is_no_folder(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(MidusError, match="file is a file; give a folder with --output"):
        analysis_folder("heads", None, tmp_path / place)

"""The picture of settings varied one at a time: each against the method as it is."""

import math

import pytest
from small import HML, report_of

from midus.studies.settings_plot import SETTINGS_NAME, find_varied, plot_settings

VARY = {"upscale.memory.top_k": [1, 2], "upscale.num_inserted": [1]}


def report(tmp_path, material, figures, method=None, **overrides):
    hml = {"set": HML, "label": "HML", "vary": VARY, **(method or {})}
    losses = [None if loss is None else (loss, 9.0) for loss in figures]
    study = {"methods": {"hml": hml}, "search": {}, "equal_trials": False, **overrides}
    return report_of(tmp_path, material, losses, **study)


def found(*args, **kwargs):
    """Labels with changes, of the one method."""
    (varied,) = find_varied(report(*args, **kwargs)).values()
    return {one.label: one.changes for one in varied}


def per_cent(loss, plain):
    return pytest.approx(100 * (math.exp(loss - plain) - 1))


def test_each_setting_stands_against_the_method_as_it_is(tmp_path, material):
    assert found(tmp_path, material, [2.0, 2.5, 1.9, 2.0]) == {
        "top_k=1": [per_cent(2.5, 2.0)],
        "top_k=2": [per_cent(1.9, 2.0)],
        "num_inserted=1": [0.0],
    }


def test_seeds_are_compared_with_themselves(tmp_path, material):
    # Plain, then each setting, with both seeds.
    changes = found(tmp_path, material, [2.0, 3.0, 2.1, 3.1, 2.0, 3.2, 2.0, 3.0], seeds=[0, 5])
    assert changes["top_k=1"] == [per_cent(2.1, 2.0)] * 2
    assert changes["top_k=2"] == [0.0, per_cent(3.2, 3.0)]


def test_what_is_searched_besides_is_at_its_best(tmp_path, material):
    search = {"optimizer.lr": [1e-3, 1e-2]}
    changes = found(tmp_path, material, [2.0, 3.0, 4.0, 2.2, 2.0, 5.0, 9.0, 9.0], search=search)
    assert changes["top_k=1"] == [per_cent(2.2, 2.0)]
    assert changes["top_k=2"] == [0.0]


def test_what_failed_is_left_out(tmp_path, material):
    assert set(found(tmp_path, material, [2.0, None, 1.9, 2.0])) == {"top_k=2", "num_inserted=1"}


def test_without_the_method_as_it_is_there_is_nothing_to_stand_against(tmp_path, material):
    assert find_varied(report(tmp_path, material, [None, 2.0, 1.9, 2.0])) == {}


def test_tokens_are_no_setting_and_no_plain_method(tmp_path, material):
    vary = {"data.max_tokens": [256], "upscale.memory.top_k": [1]}
    changes = found(tmp_path, material, [2.0, 1.0, 2.2], method={"vary": vary})
    assert changes == {"top_k=1": [per_cent(2.2, 2.0)]}


def test_the_picture_is_drawn_where_there_is_one(tmp_path, material):
    assert plot_settings(report(tmp_path, material, [2.0, 2.5, 1.9, 2.0]), tmp_path) == [
        SETTINGS_NAME
    ]
    assert (tmp_path / SETTINGS_NAME).stat().st_size > 1000


def test_a_study_that_varies_nothing_has_none(tmp_path, material):
    made = report(tmp_path, material, [2.0], method={"vary": {}})
    assert plot_settings(made, tmp_path) == []
    assert not (tmp_path / SETTINGS_NAME).exists()

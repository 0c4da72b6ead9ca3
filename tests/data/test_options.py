"""Options of a run's data: what YAML gives, and what is refused."""

import pytest

from midus.data import DataOptions, SourceOptions
from midus.errors import MidusError


def test_a_source_may_be_a_path_alone():
    expected = (SourceOptions(path="a.jsonl"),)
    assert DataOptions.from_dict({"sources": "a.jsonl"}).sources == expected
    assert DataOptions.from_dict({"sources": ["a.jsonl"]}).sources == expected
    assert DataOptions.from_dict({"sources": [{"path": "a.jsonl"}]}).sources == expected


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"sources": "a", "seqlen": 3}, "unknown option 'seqlen' for DataOptions; known options: "),
        ({"sources": [{"path": "a", "heft": 3}]}, "unknown option 'heft' for SourceOptions"),
        ({"sources": [{"weight": 3}]}, "has no path"),
        ({"sources": []}, "sources is empty"),
        ({}, "data has no sources"),
        ({"sources": 3}, "sources=3 must be a path or a list"),
        ({"sources": [{"path": "a", "weight": 0}]}, "weight=0 of source a"),
        ({"sources": "a", "held_out": 1}, "held_out=1 must be a share"),
        ({"sources": "a", "seq_len": "2k"}, "seq_len='2k' must be a whole number"),
        ({"sources": "a", "max_tokens": 0}, "max_tokens=0 must be a whole number"),
        ({"sources": "a", "row_format": "csv"}, "row_format='csv' is unknown; choose one of auto"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(values, part):
    with pytest.raises(MidusError) as error:
        DataOptions.from_dict(values)
    assert part in str(error.value)

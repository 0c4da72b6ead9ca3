"""Token folders: packing, and folders that are not what their manifest says."""

import pickle

import pytest
from corpora import token_folder
from torch.utils.data import DataLoader

from midus.data.tokens import TokenDataset, TokenFolder
from midus.errors import MidusError


def ids(dataset):
    return [item["input_ids"].tolist() for item in dataset]


def test_ten_tokens_make_two_sequences_of_four(tmp_path):
    folder = token_folder(tmp_path / "t", train=[[10, 11, 2, 12, 13, 14, 2, 15, 16, 2]])
    data = TokenDataset(folder, "train", 4)
    assert ids(data) == [[10, 11, 2, 12], [13, 14, 2, 15]]
    assert data[1]["labels"].tolist() == data[1]["input_ids"].tolist()
    assert data[-1]["input_ids"].tolist() == [13, 14, 2, 15]
    with pytest.raises(IndexError):
        data[2]


def test_the_remainder_of_every_file_is_left_out(tmp_path):
    folder = token_folder(tmp_path / "t", train=[[1, 2, 3, 4, 5], [6], [7, 8, 9]])
    assert ids(TokenDataset(folder, "train", 2)) == [[1, 2], [3, 4], [7, 8]]


def test_max_tokens_takes_whole_sequences_from_the_start(tmp_path):
    folder = token_folder(tmp_path / "t", train=[[1, 2, 3, 4, 5, 6]])
    assert ids(TokenDataset(folder, "train", 2, max_tokens=5)) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 65_535), ("uint32", 4_000_000_000)])
def test_both_widths_hold_their_largest_ids(tmp_path, dtype, largest):
    folder = token_folder(tmp_path / "t", dtype, train=[[largest, 1]])
    assert ids(TokenDataset(folder, "train", 2)) == [[largest, 1]]


def test_a_dataset_pickles_without_its_tokens(tmp_path):
    folder = token_folder(tmp_path / "t", train=[list(range(5_000))])
    data = TokenDataset(folder, "train", 100)
    first = ids(data)
    assert len(pickle.dumps(data)) < 3_000
    assert ids(pickle.loads(pickle.dumps(data))) == first


def test_dataloader_workers_read_the_same_sequences(tmp_path):
    folder = token_folder(tmp_path / "t", train=[list(range(40))])
    data = TokenDataset(folder, "train", 4)
    batches = DataLoader(data, batch_size=5, num_workers=2, multiprocessing_context="fork")
    assert [row for batch in batches for row in batch["input_ids"].tolist()] == ids(data)


def test_a_split_shorter_than_one_sequence_is_refused(tmp_path):
    folder = token_folder(tmp_path / "t", train=[[1, 2, 3]])
    with pytest.raises(MidusError, match="3 train tokens to use, fewer than one sequence"):
        TokenDataset(folder, "train", 4)
    with pytest.raises(MidusError, match="0 held_out tokens"):
        TokenDataset(folder, "held_out", 4)


def test_a_truncated_file_is_refused(tmp_path):
    folder = token_folder(tmp_path / "t", train=[[1, 2, 3]])
    (folder / "train-00000.bin").write_bytes(b"12")
    with pytest.raises(MidusError, match=r"train-00000\.bin has 2 bytes and its manifest says 6"):
        TokenFolder(folder)
    (folder / "train-00000.bin").unlink()
    with pytest.raises(MidusError, match="is missing"):
        TokenFolder(folder)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "is not a token folder"),
        ("{", "is not a token folder"),
        ("[]", "is not a token folder"),
        ("{}", "is not a token folder"),
        (
            '{"format": "midus-tokens", "version": 9, "dtype": "uint16", "tokenizer": '
            '{"sha256": ""}, "splits": {"train": {"files": []}}}',
            "is in format midus-tokens 9",
        ),
    ],
)
def test_what_is_no_token_folder_is_refused(tmp_path, text, part):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(MidusError, match=part):
        TokenFolder(tmp_path)

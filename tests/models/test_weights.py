import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from midus.errors import MidusError
from midus.models.weights import Weights, same_tensor, write_copy


@pytest.fixture
def stored(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(5, 3),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "count": torch.arange(4),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors, tmp_path


def test_tensors_are_read_as_safetensors_reads_them(stored):
    tensors, folder = stored
    weights = Weights.open_folder(folder)
    assert set(weights) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name), tensor)
    assert torch.equal(weights.read("a", 2, 2), tensors["a"][2:4])


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_copy_is_what_safetensors_reads(stored, dtype):
    tensors, folder = stored
    weights = Weights.open_folder(folder)
    write_copy(
        folder / "copy.safetensors", weights, {name: f"new.{name}" for name in weights}, dtype
    )
    copied = load_file(folder / "copy.safetensors")
    again = Weights.open_file(folder / "copy.safetensors")
    for name, tensor in tensors.items():
        expected = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert torch.equal(copied[f"new.{name}"], expected)
        assert same_tensor(weights, name, again, f"new.{name}", dtype or tensor.dtype)
    assert not same_tensor(weights, "a", again, "new.b", torch.float32)


def test_one_flipped_bit_is_noticed(stored):
    _, folder = stored
    weights = Weights.open_folder(folder)
    write_copy(folder / "copy.safetensors", weights, {"a": "a"})
    data = bytearray((folder / "copy.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "copy.safetensors").write_bytes(data)
    again = Weights.open_file(folder / "copy.safetensors")
    assert not same_tensor(weights, "a", again, "a", torch.float32)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_truncated_files_are_refused(stored, keep):
    _, folder = stored
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MidusError, match="not a whole safetensors file"):
        Weights.open_folder(folder)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        '{"a": 3}',
        '{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_broken_headers_are_refused(tmp_path, header):
    text = header.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(MidusError):
        Weights.open_folder(tmp_path)


def test_index_errors_are_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(MidusError, match="not a safetensors index"):
        Weights.open_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(MidusError, match=r"gone\.safetensors is missing"):
        Weights.open_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(MidusError, match="not a file beside it"):
        Weights.open_folder(tmp_path)


def test_pickles_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(MidusError, match="has no weights"):
        Weights.open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(MidusError, match="pickle weights only"):
        Weights.open_folder(tmp_path)

"""Checkpoints made to do harm: each is refused with one sentence, and nothing happens besides.

`docs/security.md` says what is promised. The first part goes through hand-made folders, the last
part through some thousand damaged ones at random, from fixed seeds.
"""

import copy
import json
import os
import pickle
import random
import resource
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_base
from transformers import AutoModelForCausalLM

from midus import MemoryConfig, MidusError, UpscaleConfig
from midus.models.atomic import refuse_overlap
from midus.models.configuration import read_config
from midus.models.loading import load_model, load_tokenizer
from midus.models.weights import Weights, require_finite
from midus.upscaling import merge_delta, upscale_checkpoint
from midus.upscaling.inspect import describe, plan_of

DELTA = "delta.safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MEMORY = MemoryConfig(num_subkeys=8, top_k=4)
TABLE = "model.layers.1.memory.values.latent_values"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A base, its delta, its full checkpoint and a delta of copied blocks, all sound."""
    folder = tmp_path_factory.mktemp("originals")
    save_base(folder / "base")
    config = UpscaleConfig(memory=MEMORY)
    upscale_checkpoint(folder / "base", folder / "delta", config, delta=True)
    upscale_checkpoint(folder / "base", folder / "full", config)
    copied = UpscaleConfig(method="llama_pro")
    upscale_checkpoint(folder / "base", folder / "copied", copied, delta=True)
    return folder


@pytest.fixture
def place(originals, tmp_path):
    """Copies of them to spoil; the deltas' base stays sound."""
    for name in ("base", "delta", "full", "copied"):
        shutil.copytree(originals / name, tmp_path / name)
    return tmp_path


def read_header(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path, header, data):
    """A safetensors file with any header: a dict, or the text itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def assert_sentence(text):
    assert "\n" not in text.strip("\n"), text
    assert text.strip("\n").isprintable(), text
    assert len(text) < 1500, text[:3000]
    assert "Traceback" not in text


def assert_refuses(midus, place, what, *parts, commands=None, load=True):
    """Every command that reads the folder ends with code 2 and one sentence, and writes nothing."""
    folder = place / what
    every = {
        "merge": ("merge", folder, place / "OUT"),
        "verify": ("verify", place / "base", folder, "--max-tokens", 8),
        "upscale": ("upscale", folder, place / "OUT", "--num-subkeys", 8),
        "inspect": ("inspect", folder),
    }
    if commands is None:
        commands = ["merge", "verify"] if what in ("delta", "copied") else ["verify", "upscale"]
    before = listing(place)
    for command in commands:
        result = midus(*every[command])
        assert result.code == 2, (command, result.out + result.err)
        assert result.err.startswith("midus: ")
        assert_sentence(result.err)
        assert "Traceback" not in result.out
        for part in parts:
            assert part in result.err, (command, result.err)
    if load:
        with pytest.raises(MidusError) as caught:
            load_model(folder)
        assert_sentence(str(caught.value))
    assert listing(place) == before


def listing(folder):
    return {
        path.relative_to(folder): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
    }


# Headers of weight files.


def shape_to(*shape):
    return lambda info, size: info.update(shape=list(shape))


def offsets_to(start, stop):
    return lambda info, size: info.update(data_offsets=[start, stop])


BAD_ROWS = {
    "2**60 elements": shape_to(2**60),
    "2**60 in two": shape_to(2**30, 2**30),
    "2**200 elements": shape_to(2**200),
    "more than the bytes": shape_to(64, 9),
    "empty, but huge": shape_to(0, 2**62, 2**62),
    "a thousand dimensions": shape_to(*[1] * 1000),
    "a negative size": shape_to(-64, -8),
    "a size that is true": shape_to(True, 8),
    "a size with a fraction": shape_to(64.0, 8),
    "a size as text": shape_to("64", 8),
    "no list": lambda info, size: info.update(shape=512),
    "outside the file": lambda info, size: info.update(data_offsets=[size, size + 2048]),
    "over another tensor": offsets_to(0, 2048),
    "backwards": offsets_to(2048, 0),
    "before the data": offsets_to(-2048, 0),
    "three offsets": lambda info, size: info.update(data_offsets=[0, 1, 2]),
    "offsets of 4,000 digits": offsets_to(10**3999, 10**3999 + 2048),
    "no dtype": lambda info, size: info.pop("dtype"),
    "unknown dtype": lambda info, size: info.update(dtype="F33\x1b[31m\n"),
    "a dtype that is a list": lambda info, size: info.update(dtype=["F32"]),
}


@pytest.mark.parametrize("damage", BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_of_a_header_that_cannot_be(midus, place, damage):
    for what, file, name in (("delta", DELTA, TABLE), ("base", SINGLE, "model.norm.weight")):
        header, data = read_header(place / what / file)
        damage(header[name], len(data))
        write_header(place / what / file, header, data)
    assert_refuses(midus, place, "base", SINGLE, commands=["upscale"])
    shutil.rmtree(place / "base")
    save_base(place / "base")
    assert_refuses(midus, place, "delta", DELTA)


BAD_HEADERS = {
    "no JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "a number": b"7",
    "rows that are numbers": b'{"a": 3}',
    "nested": b"[" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "NaN": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    "infinity": b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
    "a number of 5,000 digits": b'{"a": {"dtype": "F32", "shape": [%s]}}' % (b"9" * 5000),
    "not UTF-8": b'{"\xff": {}}',
    "half a character": b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "the same name twice": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
    b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "metadata twice": b'{"__metadata__": {}, "__metadata__": {}}',
    "a hole": b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [2, 2]}, '
    b'"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_headers_that_are_none(midus, place, header):
    write_header(place / "delta" / DELTA, header, b"\0" * 4)
    assert_refuses(midus, place, "delta", DELTA)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, (100 << 20) + 1, 10**6])
def test_a_header_longer_than_its_file_or_than_headers_are(midus, place, length):
    path = place / "delta" / DELTA
    data = path.read_bytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length) + data[8:])
        if length == (100 << 20) + 1:
            file.truncate(length + 100)  # long enough, of zeros that take no disk
    assert_refuses(midus, place, "delta", "not a whole safetensors file")


# Indices and files that lead elsewhere.


def with_index(folder, weight_map):
    (folder / SINGLE).rename(folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "shard",
    [
        "../../etc/passwd",
        "../secret.safetensors",
        "/etc/passwd",
        "/tmp/x.safetensors",
        "..",
        ".",
        "",
        "sub/model.safetensors",
        "sub\\..\\x.safetensors",
        "~/x.safetensors",
        "a\nb.safetensors",
        "a\0.safetensors",
        "pytorch_model.bin",
        None,
        5,
        ["model.safetensors"],
        {},
        "x" * 5000 + ".safetensors",
    ],
)
def test_an_index_never_leads_out_of_its_folder(midus, place, shard):
    with_index(place / "base", {"model.norm.weight": shard})
    assert_refuses(midus, place, "base", INDEX, "not a file beside it")


@pytest.mark.parametrize("index", ["[]", "null", "{}", '{"weight_map": []}', "[" * 10**6, "\x00"])
def test_an_index_that_is_none(midus, place, index):
    with_index(place / "base", {})
    (place / "base" / INDEX).write_text(index)
    assert_refuses(midus, place, "base", "is not a safetensors index")


def test_shards_that_are_missing_folders_or_links_outwards(midus, place):
    base = place / "base"
    with_index(base, {"a": "gone.safetensors"})
    assert_refuses(midus, place, "base", "gone.safetensors is missing")
    (base / "gone.safetensors").mkdir()
    assert_refuses(midus, place, "base", "gone.safetensors is missing")
    (base / "gone.safetensors").rmdir()
    (base / "gone.safetensors").symlink_to(place / "full" / "config.json")
    assert_refuses(midus, place, "base", "outside the checkpoint")
    (base / "gone.safetensors").unlink()
    (base / "gone.safetensors").symlink_to("gone.safetensors")
    assert_refuses(midus, place, "base", "gone.safetensors")


@pytest.mark.parametrize("name", [DELTA, "config.json", "tokenizer.json", "LICENSE.txt"])
def test_links_out_of_a_delta_are_not_followed(midus, place, name):
    """A companion that is a link would carry a private file into the folder a user shares."""
    secret = place / "secret"
    secret.write_text("{}")
    (place / "delta" / name).unlink(missing_ok=True)
    (place / "delta" / name).symlink_to(secret)
    assert_refuses(midus, place, "delta", "outside the checkpoint", commands=["merge"], load=False)


def test_links_of_the_hub_cache_are_followed(originals, tmp_path):
    repo = tmp_path / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "abc").mkdir(parents=True)
    for path in (originals / "base").iterdir():
        shutil.copyfile(path, repo / "blobs" / path.name)
        (repo / "snapshots" / "abc" / path.name).symlink_to(f"../../blobs/{path.name}")
    assert load_model(repo / "snapshots" / "abc").config.num_hidden_layers == 4


def test_a_tensor_in_two_shards(midus, place):
    base = place / "base"
    with_index(base, {"a": "model-00001-of-00001.safetensors", "b": "other.safetensors"})
    save_file({"model.norm.weight": torch.zeros(32)}, base / "other.safetensors")
    assert_refuses(midus, place, "base", "both hold 'model.norm.weight'")


def test_checks_and_transformers_read_the_same_file(place):
    """Of an index and a single file transformers reads the file, so that is what is checked."""
    base = place / "base"
    shutil.copyfile(base / SINGLE, base / "sound.safetensors")
    (base / INDEX).write_text(json.dumps({"weight_map": {"a": "sound.safetensors"}}))
    edit_tensors(base / SINGLE, lambda t: t.update({"model.norm.weight": torch.zeros(7)}))
    with pytest.raises(MidusError, match=r"'model.norm.weight' of shape \[7\]"):
        load_model(base)


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.input_layernorm.weight"])
def test_two_names_of_one_tensor(midus, place, name):
    edit_tensors(place / "base" / SINGLE, lambda t: t.update({name: torch.zeros(32)}))
    edit_json(place / "delta" / "config.json", base_model={"id": str(place / "base")})
    assert_refuses(midus, place, "delta", "which are one tensor", commands=["merge"])


# Tensors.

ODD_TYPES = [torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", ODD_TYPES, ids=str)
def test_types_that_are_no_weights(midus, place, dtype):
    edit_tensors(place / "delta" / DELTA, lambda t: t.update({TABLE: t[TABLE].to(dtype)}))
    assert_refuses(midus, place, "delta", TABLE, "where float32, bfloat16 or float16 belongs")
    name = "model.norm.weight"
    edit_tensors(place / "base" / SINGLE, lambda t: t.update({name: t[name].to(dtype)}))
    assert_refuses(midus, place, "base", name, "where float32, bfloat16 or float16 belongs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_delta_with_nan_or_infinity(midus, place, value, dtype):
    def spoil(tensors):
        tensors[TABLE] = tensors[TABLE].to(dtype)
        tensors[TABLE][3, 5] = value

    edit_tensors(place / "delta" / DELTA, spoil)
    assert_refuses(midus, place, "delta", f"NaN or infinity in {TABLE!r}")
    with pytest.raises(MidusError, match="NaN or infinity"):
        AutoModelForCausalLM.from_pretrained(place / "delta")


def test_a_copied_block_with_nan(midus, place):
    name = "model.layers.2.mlp.up_proj.weight"
    edit_tensors(place / "copied" / DELTA, lambda t: t[name].fill_(float("nan")))
    assert_refuses(midus, place, "copied", f"NaN or infinity in {name!r}")


def test_the_largest_numbers_are_finite():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
        assert require_finite(tensor, "a", "here") is tensor
    require_finite(torch.zeros(0), "a", "here")
    require_finite(torch.ones(3, dtype=torch.int64), "a", "here")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.1.memory.extra", "does not have"),
        ("layers.1.memory.values.latent_values", "does not have"),
        ("model.layers.01.memory.values.latent_values", "belongs to the base"),
        ("model.layers.\u0661.memory.values.latent_values", "belongs to the base"),
        ("model.layers." + "1" * 5000 + ".x", "belongs to the base"),
        ("model.layers.0.mlp.up_proj.weight", "belongs to the base"),
        ("lm_head.weight", "belongs to the base"),
        ("evil\x1b[2J\n", "belongs to the base"),
    ],
    ids=lambda value: value[:20].encode("unicode_escape").decode(),
)
def test_tensors_a_delta_has_no_place_for(midus, place, name, part):
    edit_tensors(place / "delta" / DELTA, lambda t: t.update({name: torch.zeros(64, 8)}))
    assert_refuses(midus, place, "delta", part)


def test_a_delta_of_other_shapes_is_refused_before_anything_is_allocated(midus, place):
    memory = {**MEMORY.to_dict(), "num_subkeys": 65_536, "latent_dim": 65_536}
    edit_json(place / "delta" / "config.json", memory=memory)
    before = peak_memory()
    assert_refuses(midus, place, "delta", "config and weights do not fit together")
    assert peak_memory() - before < 200e6


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Code.


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "w.pth", "w.pkl", "w.ckpt"])
def test_pickles_are_never_opened(midus, place, name):
    (place / "base" / SINGLE).unlink()
    (place / "base" / name).write_bytes(pickle.dumps(Bomb(place / "boom")))
    assert_refuses(midus, place, "base", "pickle weights only")
    assert not (place / "boom").exists()


def test_a_pickle_beside_the_weights_is_left_alone(place):
    for what in ("base", "delta", "full"):
        for name in ("pytorch_model.bin", "delta.bin", "training_args.bin", "adapter_model.bin"):
            (place / what / name).write_bytes(pickle.dumps(Bomb(place / "boom")))
        load_model(place / what)
        load_tokenizer(place / what)
    assert not (place / "boom").exists()


@pytest.mark.parametrize("what", ["base", "delta", "full", "copied"])
def test_code_beside_the_weights_is_not_run(midus, place, what):
    folder = place / what
    code = f"import os\nos.mkdir({str(place / 'boom')!r})\n"
    (folder / "custom_generate").mkdir()
    for name in ("evil.py", "modeling_midus.py", "custom_generate/generate.py", "config.py"):
        (folder / name).write_text(code)
    auto_map = {
        "AutoConfig": "evil.EvilConfig",
        "AutoModel": "evil.EvilModel",
        "AutoModelForCausalLM": "evil.EvilModel",
        "AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"],
    }
    extra = {"auto_map": auto_map, "trust_remote_code": True, "custom_pipelines": {"x": {}}}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            edit_json(folder / name, **extra)
    model = load_model(folder)
    tokenizer = load_tokenizer(folder)
    model.generate(tokenizer("w5", return_tensors="pt").input_ids, max_new_tokens=1)
    midus("inspect", folder)
    midus("verify", place / "base", folder, "--max-tokens", 8)
    assert midus("generate", folder, "--prompt", "w5", "--max-new-tokens", 1).code == 0
    if what in ("delta", "copied"):
        assert midus("merge", folder, place / "OUT").code == 0
    if what == "base":
        assert midus("upscale", folder, place / "OUT", "--num-subkeys", 8).code == 0
    assert not (place / "boom").exists()
    written = [path.read_text() for path in (place / "OUT").glob("*.py")]
    assert not any("mkdir" in text for text in written)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("transformers_weights", "../../x.safetensors", "points a loader to other files"),
        ("transformers_weights", "adapter_model.bin", "points a loader to other files"),
        ("configuration_files", ["config.4.0.0.json"], "points a loader to other files"),
        ("attn_implementation", "evil/kernels", "can fetch code from the hub"),
        ("_attn_implementation", "paged|evil/kernels:run", "can fetch code from the hub"),
        ("_attn_implementation_internal", {"": "evil/kernels"}, "can fetch code from the hub"),
    ],
)
@pytest.mark.parametrize("what", ["base", "delta", "full"])
def test_fields_that_lead_a_loader_elsewhere(midus, place, what, field, value, part):
    edit_json(place / what / "config.json", **{field: value})
    with pytest.raises(MidusError, match=part):
        load_model(place / what)
    result = midus("inspect", place / what)
    assert result.code == 2
    assert_sentence(result.err)


def test_an_adapter_does_not_choose_the_model(place):
    (place / "base" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(place / "full"), "peft_type": "LORA"})
    )
    with pytest.raises(MidusError, match="would load another model"):
        load_model(place / "base")


# Configs.

BAD_CONFIGS = {
    "a list": b"[]",
    "null": b"null",
    "a text": b'"llama"',
    "nothing": b"",
    "not UTF-8": b"\xff\xfe",
    "ten megabytes of lists": b"[" * 10_000_000,
    "ten megabytes of objects": b'{"a":' * 2_000_000,
    "a number of 5,000 digits": b'{"model_type": "midus_llama", "vocab_size": %s}' % (b"9" * 5000),
    "a field twice": b'{"model_type": "llama", "model_type": "midus_llama"}',
    "NaN": b'{"model_type": "midus_llama", "rms_norm_eps": NaN}',
}


@pytest.mark.parametrize("text", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_configs_that_are_none(midus, place, text):
    every = ["merge", "verify", "upscale", "inspect"]
    for what in ("delta", "base"):
        (place / what / "config.json").write_bytes(text)
        commands = every if what == "delta" else ["upscale", "inspect"]
        assert_refuses(midus, place, what, "config.json", commands=commands)


def test_a_config_larger_than_configs_are(midus, place):
    with (place / "delta" / "config.json").open("ab") as file:
        file.truncate(10**12)  # of zeros that take no disk
    assert_refuses(midus, place, "delta", "1,000,000,000,000 bytes", commands=["merge", "inspect"])


BAD_FIELDS = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
    ({"num_hidden_layers": -1}, "6 blocks|num_hidden_layers=-1|stack of -1 blocks"),
    ({"num_hidden_layers": 0}, "stack of 0 blocks"),
    ({"num_hidden_layers": "6"}, "num_hidden_layers"),
    ({"hidden_size": -32}, "hidden_size=-32"),
    ({"hidden_size": "32"}, "hidden_size"),
    ({"hidden_size": 2**62}, "hidden_size"),
    ({"vocab_size": 0}, "vocab_size=0"),
    ({"vocab_size": 10**30}, "vocab_size"),
    ({"num_attention_heads": 0}, "num_attention_heads|ZeroDivision|by zero"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
    ({"num_key_value_heads": 3}, "a multiple of num_key_value_heads=3"),
    ({"head_dim": -8}, "head_dim=-8"),
    ({"pad_token_id": 10**9}, ""),
    ({"hidden_act": "os.system"}, "os.system"),
    ({"rope_parameters": {"rope_type": "evil"}}, ""),
    ({"rope_parameters": 7}, ""),
    ({"memory_positions": [1, 600]}, "memory_positions"),
    ({"memory_positions": [-1, 4]}, "memory_positions"),
    ({"memory_positions": [4, 4]}, "memory_positions"),
    ({"memory_positions": [4, 1]}, "memory_positions"),
    ({"memory_positions": [1, "4"]}, "memory_positions"),
    ({"memory_positions": [True, 4]}, "memory_positions"),
    ({"memory_positions": [1.5]}, "memory_positions"),
    ({"memory_positions": list(range(10**6))}, "memory_positions"),
    ({"memory_positions": []}, "memory_positions"),
    ({"memory_positions": None}, "memory_positions"),
    ({"memory": {**MEMORY.to_dict(), "num_subkeys": 10**9}}, "num_subkeys=1000000000"),
    ({"memory": {**MEMORY.to_dict(), "num_subkeys": "8"}}, "num_subkeys='8'"),
    ({"memory": {**MEMORY.to_dict(), "top_k": -1}}, "top_k=-1"),
    ({"memory": {**MEMORY.to_dict(), "kind": "evil"}}, "'evil' is unknown"),
    ({"memory": {**MEMORY.to_dict(), "kind": ["hml"]}}, ""),
    ({"memory": {**MEMORY.to_dict(), "query_norm": {"a": 1}}}, "query_norm"),
    ({"memory": {"kind\n\x1b": 1}}, "unknown option"),
    ({"memory": 5}, "memory=5"),
    ({"upscaling": [1]}, "upscaling="),
    ({"is_delta": "yes"}, "is_delta='yes'"),
    ({"midus_format": "9"}, "midus format 9"),
    ({"midus_format": 0}, "midus format 0"),
    ({"base_model": "base"}, "base_model='base'"),
    ({"base_model": {"id": 5}}, "base_model['id']=5"),
    ({"base_model": {"id": ["a"]}}, "base_model['id']"),
    ({"base_model": {"id": "a\nb"}}, r"base_model['id']='a\nb'"),
    ({"base_model": {"id": "\x1b[2Jx"}}, "base_model['id']"),
    ({"base_model": {"id": "\ud800"}}, "not UTF-8"),
    ({"base_model": {"id": "base", "fingerprint": 7}}, "base_model['fingerprint']=7"),
    ({"base_model": {"id": "base", "revision": {}}}, "base_model['revision']"),
    ({"base_model": {"id": "base", "licence": {"license: x\nevil": "y"}}}, "licence"),
    ({"model_type": "midus_evil"}, "'evil' is not supported"),
    ({"model_type": "midus_\n\x1b"}, "is not supported"),
    ({"model_type": 7}, "names no model_type"),
]


@pytest.mark.parametrize(("changes", "part"), BAD_FIELDS, ids=lambda v: str(v)[:60])
def test_configs_that_cannot_be(midus, place, changes, part):
    edit_json(place / "delta" / "config.json", **changes)
    every = ["merge", "verify", "inspect"]
    assert_refuses(midus, place, "delta", commands=every)
    with pytest.raises(MidusError) as caught:
        load_model(place / "delta")
    assert any(piece in str(caught.value) for piece in part.split("|"))


@pytest.mark.parametrize(
    "source",
    ["a\nb", "\x1b[2J", "x" * 5000, "~nobody-here/x", "a/b/c", "\0", "x.gguf\n.gguf"],
    ids=lambda value: value[:12].encode("unicode_escape").decode(),
)
def test_odd_names_of_models(midus, place, source, monkeypatch):
    monkeypatch.chdir(place)
    for command in (("inspect", source), ("merge", "delta", "OUT", "--base", source)):
        result = midus(*command)
        assert result.code == 2, result.err
        assert_sentence(result.err)


BAD_RECORDS = [
    {"positions": [2, 2]},
    {"positions": [5, 2]},
    {"positions": [2, 600]},
    {"positions": [True, 5]},
    {"positions": {}},
    {"anchors": [1]},
    {"method": ["llama_pro"]},
    {"trainable": None},
    {"is_delta": "yes"},
    {"base_model": "abc"},
    {"base_model": {"id": 7}},
    {"base_model": {"id": "a\nb"}},
]


@pytest.mark.parametrize("changes", BAD_RECORDS, ids=str)
@pytest.mark.parametrize("file", ["config.json", "midus.json"])
def test_records_that_cannot_be(midus, place, changes, file):
    config = json.loads((place / "copied" / "config.json").read_text())
    record = {**config.pop("midus"), **changes}
    if file == "config.json":
        config["midus"] = record
    (place / "copied" / "config.json").write_text(json.dumps(config))
    (place / "copied" / "midus.json").write_text(json.dumps(record))
    assert_refuses(midus, place, "copied", commands=["merge", "verify", "inspect"])


def test_a_delta_that_is_its_own_base(midus, place):
    shutil.copytree(place / "delta", place / "other")
    for first, second in (("delta", "delta"), ("delta", "other")):
        edit_json(place / first / "config.json", base_model={"id": str(place / second)})
        edit_json(place / second / "config.json", base_model={"id": str(place / first)})
        assert_refuses(midus, place, "delta", "which holds no whole model", commands=["merge"])


def test_a_type_that_is_none(midus, place):
    for value in ("load", "nn", "int64", "float8_e4m3fn", 7, ["float32"]):
        edit_json(place / "delta" / "config.json", dtype=value)
        assert_refuses(midus, place, "delta", "dtype", commands=["merge"])


def test_generation_settings_that_are_none(place):
    for text in ("[]", "null", '{"max_length": "x", "num_beams": -3, "watermarking_config": 5}'):
        (place / "delta" / "generation_config.json").write_text(text)
        with pytest.raises(MidusError):
            load_model(place / "delta")


def test_tokenizers_that_are_none(place):
    for text in ("[]", "{", '{"model": {"type": "BPE", "vocab": 3}}', "null"):
        (place / "base" / "tokenizer.json").write_text(text)
        with pytest.raises(MidusError) as caught:
            load_tokenizer(place / "base")
        assert_sentence(str(caught.value))


# Fuzzing: from fixed seeds, so that a failure comes again.

VALUES = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**63, 2**64, 10**9, 10**30, 10**3000, 0.5,
    -0.0, 1e308, "", "x", "8", "\n\x1b[31m", "\ud800", "../../etc/passwd", "/etc/passwd", "~root",
    "F32", "I64", "F8_E5M2", "BOOL", "float32", "midus_llama", "llama", "eager", "\0", "x" * 3000,
    [], [1], [[]], [None], list(range(50)), {}, {"a": 1}, {"": None}, {"id": "base"}, [[[[[[]]]]]],
]  # fmt: skip


def mutate_json(rng, value):
    """Some field, however deep, is replaced, removed, doubled under another name or emptied."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holder = value
        for _ in range(rng.randrange(4)):
            inner = list(holder.values()) if isinstance(holder, dict) else list(holder)
            inner = [item for item in inner if isinstance(item, dict | list) and item]
            if not inner:
                break
            holder = rng.choice(inner)
        if not holder:
            continue
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        way = rng.randrange(6)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, dict):
            holder[rng.choice(("x", "", "é\n", str(key) + "0"))] = copy.deepcopy(holder[key])
        elif way == 2 and isinstance(holder[key], int):
            holder[key] = holder[key] + rng.choice((-1, 1, 64, -(10**6), 2**40))
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def mutate_bytes(rng, data):
    """Some bytes are flipped, cut out, doubled or written over."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data)) if data else 0
        span = rng.choice((1, 1, 2, 16))
        way = rng.randrange(4)
        if way == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del data[at : at + span]
        elif way == 2:
            data[at:at] = data[at : at + span]
        else:
            data[at : at + span] = rng.choice((b"9" * 20, b"[", b"{", b'"', b"-", b"\0", b"\xff"))
    return bytes(data)


def refused(call, *args):
    """Whether a call was refused, with one sentence; any other exception goes through."""
    try:
        call(*args)
    except MidusError as error:
        assert_sentence(str(error))
        return True
    return False


def read_everything(folder):
    config = read_config(folder)
    describe(config)
    plan_of(config)


def use_delta(folder, out):
    """Merges and loads a delta that passed the first checks."""
    if not refused(merge_delta, folder, out):
        shutil.rmtree(out)
    refused(load_model, folder)


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_headers(originals, tmp_path, seed):
    rng = random.Random(seed)
    header, data = read_header(originals / "delta" / DELTA)
    text = (originals / "delta" / DELTA).read_bytes()
    sandbox = tmp_path / "sandbox"
    shutil.copytree(originals / "delta", sandbox / "delta")
    path = sandbox / "delta" / DELTA
    num_refused = num_used = 0
    for case in range(500):
        if case % 2:
            write_header(path, mutate_json(rng, header), data)
        else:
            size = len(text) - len(data)
            path.write_bytes(mutate_bytes(rng, text[:size]) + data)
        if refused(Weights.open_file, path):
            num_refused += 1
        elif num_used < 6:
            num_used += 1
            before = listing(sandbox)
            use_delta(sandbox / "delta", tmp_path / "OUT")
            assert listing(sandbox) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["sandbox"]
    assert num_refused > 300
    assert num_used


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", ["delta", "copied"])
def test_fuzzed_configs(originals, tmp_path, what, seed):
    rng = random.Random(seed)
    sandbox = tmp_path / "sandbox"
    shutil.copytree(originals / what, sandbox / what)
    path = sandbox / what / "config.json"
    text = path.read_bytes()
    accepted = 0
    for case in range(100):
        if case % 3:
            path.write_text(json.dumps(mutate_json(rng, json.loads(text))))
        else:
            path.write_bytes(mutate_bytes(rng, text))
        before = listing(sandbox)
        if not refused(read_everything, sandbox / what):
            accepted += 1
            if accepted <= 4:
                use_delta(sandbox / what, tmp_path / "OUT")
        assert listing(sandbox) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["sandbox"]
    assert accepted > 5


def test_fuzzed_records(originals, tmp_path):
    rng = random.Random(0)
    sandbox = tmp_path / "sandbox"
    shutil.copytree(originals / "copied", sandbox)
    config = json.loads((sandbox / "config.json").read_text())
    record = config.pop("midus")
    (sandbox / "config.json").write_text(json.dumps(config))
    for case in range(200):
        text = json.dumps(mutate_json(rng, record)).encode()
        (sandbox / "midus.json").write_bytes(text if case % 3 else mutate_bytes(rng, text))
        if not refused(read_everything, sandbox) and case % 16 == 0:
            use_delta(sandbox, tmp_path / "OUT")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["sandbox"]


def test_fuzzed_indices(originals, tmp_path):
    rng = random.Random(0)
    sandbox = tmp_path / "sandbox"
    shutil.copytree(originals / "full", sandbox)
    text = (sandbox / INDEX).read_bytes()
    for case in range(500):
        if case % 2:
            (sandbox / INDEX).write_text(json.dumps(mutate_json(rng, json.loads(text))))
        else:
            (sandbox / INDEX).write_bytes(mutate_bytes(rng, text))
        try:
            weights = Weights.open_folder(sandbox)
        except MidusError as error:
            assert_sentence(str(error))
        else:
            assert {entry.file.parent for entry in weights.values()} == {sandbox}


def test_the_folders_that_are_fuzzed_are_sound(originals, tmp_path):
    """Else the tests above would pass for the wrong reason."""
    for what in ("delta", "copied"):
        read_everything(originals / what)
        merge_delta(originals / what, tmp_path / what)
        assert load_model(originals / what).config.num_hidden_layers == 6
    refuse_overlap(tmp_path / "delta", originals / "delta")

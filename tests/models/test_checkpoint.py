"""Full, delta and merged checkpoints hold the same model, whatever way they were made."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import (
    MEMORY,
    each_bypass,
    every_family,
    fill_tables,
    load,
    prompt_ids,
    save_base,
    tiny_base,
)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

from midus import MemoryConfig, MidusError, UpscaleConfig, upscale, upscale_checkpoint
from midus.evaluation.verify import verify
from midus.models import atomic
from midus.models.fingerprint import fingerprint
from midus.models.loading import load_model
from midus.models.weights import Weights
from midus.upscaling import merge_delta, stored

CONFIG = UpscaleConfig(memory=MEMORY)


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_every_way_gives_the_same_model(tmp_path, family, tied):
    base = save_base(tmp_path / "base", family, tie_word_embeddings=tied)
    in_memory = upscale(base, CONFIG)
    upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    merge_delta(tmp_path / "delta", tmp_path / "merged")
    for name in ("full", "delta", "merged"):
        loaded = load(tmp_path / name)
        assert type(loaded) is type(in_memory)
        assert same_state(loaded, in_memory)
        assert torch.equal(loaded(prompt_ids()).logits, base(prompt_ids()).logits)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@every_family
def test_a_trained_model_survives_saving_and_loading(tmp_path, family):
    save_base(tmp_path / "base", family)
    base = load(tmp_path / "base")
    model = fill_tables(upscale(base, CONFIG))
    model.save_pretrained(tmp_path / "full")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "delta", delta=True)
    merge_delta(tmp_path / "delta", tmp_path / "merged")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    logits = model(prompt_ids()).logits
    for name in ("full", "sharded", "delta", "merged"):
        loaded = load(tmp_path / name)
        assert same_state(loaded, model)
        assert torch.equal(loaded(prompt_ids()).logits, logits)
        headless = AutoModel.from_pretrained(tmp_path / name)
        hidden = headless(prompt_ids()).last_hidden_state
        assert torch.equal(hidden, model.model(prompt_ids()).last_hidden_state)


@each_bypass
def test_a_bypass_survives_every_way_of_saving_and_loading(tmp_path, bypass):
    save_base(tmp_path / "base")
    config = UpscaleConfig(memory=MemoryConfig(num_subkeys=8, bypass=bypass))
    for name, delta in (("fresh", False), ("fresh_delta", True)):
        done = upscale_checkpoint(tmp_path / "base", tmp_path / name, config, delta=delta)
        assert done.identity_blocks == 2
        assert same_state(load(tmp_path / name), upscale(load(tmp_path / "base"), config))
    model = fill_tables(load(tmp_path / "fresh"))
    model.save_pretrained(tmp_path / "full")
    model.save_pretrained(tmp_path / "delta", delta=True)
    merge_delta(tmp_path / "delta", tmp_path / "merged")
    stored_names = load_file(tmp_path / "delta" / "delta.safetensors").keys()
    assert {f"model.layers.{i}.bypass.weight" for i in (1, 4)} <= stored_names
    for name in ("full", "delta", "merged"):
        loaded = load(tmp_path / name)
        assert loaded.config.memory_config.bypass == bypass
        assert loaded.model.layers[1].bypass.weight.any()
        assert same_state(loaded, model)
        assert torch.equal(loaded(prompt_ids()).logits, model(prompt_ids()).logits)


def test_a_bypass_of_another_shape_is_refused(tmp_path):
    save_base(tmp_path / "base")
    config = UpscaleConfig(memory=MemoryConfig(num_subkeys=8, bypass="stream"))
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", config, delta=True)
    path = tmp_path / "delta" / "delta.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.bypass.weight"] = torch.zeros(32, 16)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(MidusError, match=r"1\.bypass.* \[32, 16\]"):
        load_model(tmp_path / "delta")


def test_a_config_from_before_the_bypass_has_none():
    values = MEMORY.to_dict()
    del values["bypass"]
    assert MemoryConfig.from_dict(values) == MEMORY
    more = MemoryConfig(num_subkeys=8, bypass="stream")
    assert MemoryConfig.from_dict(more.to_dict()) == more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sharded_base_of_any_type(tmp_path, dtype):
    base = save_base(tmp_path / "base", dtype=dtype, shard="20KB")
    assert (tmp_path / "base" / "model.safetensors.index.json").is_file()
    done = upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    assert done.equal_base_tensors == len(base.state_dict())
    assert done.identity_blocks == 2
    loaded = load(tmp_path / "full")
    assert loaded.dtype == dtype
    # Loaded, not cast: casting a model also rounds its rotary tables.
    stored_base = load(tmp_path / "base")
    assert torch.equal(loaded(prompt_ids()).logits, stored_base(prompt_ids()).logits)


@pytest.mark.parametrize("delta", [False, True])
def test_another_type_can_be_asked_for(tmp_path, delta):
    save_base(tmp_path / "base")
    upscale_checkpoint(
        tmp_path / "base", tmp_path / "out", CONFIG, delta=delta, dtype=torch.bfloat16
    )
    loaded = load(tmp_path / "out")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    base = load(tmp_path / "base", dtype=torch.bfloat16)
    assert torch.equal(loaded(prompt_ids()).logits, base(prompt_ids()).logits)


def test_a_delta_holds_the_inserted_tensors_only(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    with safe_open(tmp_path / "delta" / "delta.safetensors", "pt") as file:
        names = list(file.keys())
    assert {name.split(".")[2] for name in names} == {"1", "4"}
    assert not list((tmp_path / "delta").glob("model*.safetensors"))


def test_a_full_checkpoint_is_read_by_the_safetensors_package(tmp_path):
    base = save_base(tmp_path / "base", shard="20KB")
    upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    index = json.loads((tmp_path / "full" / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in set(index["weight_map"].values()):
        tensors.update(load_file(tmp_path / "full" / name))
    assert tensors.keys() == index["weight_map"].keys()
    assert torch.equal(
        tensors["model.layers.5.mlp.up_proj.weight"], base.model.layers[3].mlp.up_proj.weight
    )


def test_inserted_blocks_are_written_as_they_come(tmp_path, monkeypatch):
    base = save_base(tmp_path / "base")
    monkeypatch.setattr(stored, "_SHARD_BYTES", 1)
    upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    names = sorted(path.name for path in (tmp_path / "full").glob("*.safetensors"))
    assert names == [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert same_state(load(tmp_path / "full"), upscale(base, CONFIG))


def test_checkpoints_carry_tokenizer_card_and_licence(tmp_path):
    save_base(tmp_path / "base")
    for delta in (False, True):
        out = tmp_path / f"out-{delta}"
        upscale_checkpoint(tmp_path / "base", out, CONFIG, delta=delta)
        assert AutoTokenizer.from_pretrained(out)("w5 w6").input_ids == [5, 6]
        card = (out / "README.md").read_text()
        assert 'license: "mit"' in card
        assert "num_subkeys | 8" in card
        assert (out / "generation_config.json").is_file()
        assert ("delta (the inserted tensors only)" in card) == delta


def test_files_have_the_usual_mode(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    plain = tmp_path / "plain"
    plain.touch()
    modes = {path.stat().st_mode for path in (tmp_path / "delta").iterdir()}
    assert modes == {plain.stat().st_mode}


# The base a delta stands on.


def test_a_delta_is_refused_on_another_base(tmp_path):
    save_base(tmp_path / "base")
    save_base(tmp_path / "other", seed=9)
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    own = fingerprint(Weights.open_folder(tmp_path / "base"), tied=False)
    other = fingerprint(Weights.open_folder(tmp_path / "other"), tied=False)
    assert own != other
    for attempt in (
        lambda: load(tmp_path / "delta", base=tmp_path / "other"),
        lambda: merge_delta(tmp_path / "delta", tmp_path / "m", base=tmp_path / "other"),
    ):
        with pytest.raises(MidusError) as error:
            attempt()
        assert own in str(error.value)
        assert other in str(error.value)
    assert not (tmp_path / "m").exists()


def test_a_changed_base_is_noticed_where_it_stands(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    save_base(tmp_path / "base", seed=9)
    with pytest.raises(MidusError, match="is not the base of this model"):
        load(tmp_path / "delta")


def test_a_moved_base_can_be_named(tmp_path):
    base = save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with pytest.raises(MidusError, match="the recorded base cannot be used"):
        load(tmp_path / "delta")
    loaded = load(tmp_path / "delta", base=tmp_path / "moved")
    assert torch.equal(loaded(prompt_ids()).logits, base(prompt_ids()).logits)


def test_fingerprint_does_not_depend_on_the_shards(tmp_path):
    save_base(tmp_path / "one")
    save_base(tmp_path / "many", shard="20KB")
    for every in (False, True):
        values = {
            fingerprint(Weights.open_folder(tmp_path / name), False, every)
            for name in ("one", "many")
        }
        assert len(values) == 1


def test_fingerprint_of_every_element_sees_what_the_sample_does_not(tmp_path):
    save_base(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    before = [fingerprint(Weights.open_folder(tmp_path / "base"), False, e) for e in (0, 1)]
    tensors["model.embed_tokens.weight"][1, 0] += 1  # row 1 is not in the sample
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    after = [fingerprint(Weights.open_folder(tmp_path / "base"), False, e) for e in (0, 1)]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_a_delta_hashed_in_full_is_checked_in_full(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True, hash_all=True)
    load(tmp_path / "delta")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.embed_tokens.weight"][1, 0] += 1
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(MidusError, match="sha256-all"):
        load(tmp_path / "delta")


def test_a_delta_is_not_saved_when_the_base_was_trained(tmp_path):
    save_base(tmp_path / "base")
    model = upscale(load(tmp_path / "base"), CONFIG)
    model.model.layers[0].mlp.up_proj.weight.data += 0.1
    with pytest.raises(MidusError, match="save a full checkpoint instead"):
        model.save_pretrained(tmp_path / "delta", delta=True)
    assert not (tmp_path / "delta").exists()


def test_a_delta_needs_a_known_base(tmp_path):
    with pytest.raises(MidusError, match="does not record its base"):
        upscale(tiny_base(), CONFIG).save_pretrained(tmp_path / "delta", delta=True)


def test_a_delta_that_lost_a_tensor_is_refused(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    tensors = load_file(tmp_path / "delta" / "delta.safetensors")
    del tensors["model.layers.4.memory.values.value_proj"]
    save_file(tensors, tmp_path / "delta" / "delta.safetensors", {"format": "pt"})
    with pytest.raises(MidusError, match=r"lack 1 tensors.*layers\.4\.memory\.values\.value_proj"):
        load(tmp_path / "delta")
    with pytest.raises(
        MidusError, match=r"lacks the tensor .*layers\.4\.memory\.values\.value_proj"
    ):
        merge_delta(tmp_path / "delta", tmp_path / "out")


def test_base_given_for_a_full_checkpoint_is_refused(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    with pytest.raises(MidusError, match="is a full checkpoint"):
        load(tmp_path / "full", base=tmp_path / "base")


def test_upscaling_twice_is_refused(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    with pytest.raises(MidusError, match="already has memory blocks"):
        upscale_checkpoint(tmp_path / "full", tmp_path / "again", CONFIG)
    with pytest.raises(MidusError, match="already has memory blocks"):
        upscale(load(tmp_path / "full"), CONFIG)


def test_stored_extras_of_old_checkpoints_are_left_behind(tmp_path):
    """Rotary tables, and a head stored although it is tied."""
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    before = fingerprint(Weights.open_folder(tmp_path / "base"), tied=True)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    assert fingerprint(Weights.open_folder(tmp_path / "base"), tied=True) == before
    upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "full", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert torch.equal(loaded(prompt_ids()).logits, base(prompt_ids()).logits)


@pytest.mark.parametrize("way", ["full", "delta", "merged", "memory"])
def test_a_head_stored_apart_from_the_embedding_it_claims_to_be(tmp_path, way):
    """transformers loads such a base untied, so the grown model must be untied too."""
    save_base(tmp_path / "base", tie_word_embeddings=True)
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path, {"format": "pt"})
    base = load(tmp_path / "base")
    if way == "memory":
        model = upscale(base, CONFIG)
    else:
        upscale_checkpoint(tmp_path / "base", tmp_path / way, CONFIG, delta=way != "full")
        if way == "merged":
            merge_delta(tmp_path / way, tmp_path / "out")
        model = load(tmp_path / ("out" if way == "merged" else way))
        assert verify(tmp_path / "base", tmp_path / way, "w5 w6 w7").max_abs_logit_diff == 0
    assert torch.equal(model(prompt_ids()).logits, base(prompt_ids()).logits)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    fresh = load_model(tmp_path / "base")
    assert torch.equal(fresh(prompt_ids()).logits, base(prompt_ids()).logits)


@pytest.mark.parametrize("delta", [False, True])
def test_a_base_saved_without_its_head(tmp_path, delta):
    """A tied model's bare decoder has everything, under names without `model.`."""
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    for path in (tmp_path / "base").glob("*.safetensors"):
        path.unlink()
    base.model.save_pretrained(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "out", CONFIG, delta=delta)
    model = load(tmp_path / "out")
    assert torch.equal(model(prompt_ids()).logits, base(prompt_ids()).logits)
    model.save_pretrained(tmp_path / "again", delta=True, base=tmp_path / "base")
    assert same_state(load(tmp_path / "again"), model)


def test_a_decoder_without_its_head_can_be_saved_as_a_delta(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    AutoModel.from_pretrained(tmp_path / "delta").save_pretrained(tmp_path / "again", delta=True)
    assert same_state(load(tmp_path / "again"), load(tmp_path / "delta"))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_one_changed_row_of_the_base_is_noticed(tmp_path, name):
    save_base(tmp_path / "base")
    model = upscale(load(tmp_path / "base"), CONFIG)
    model.get_parameter(name).data[5] += 1
    with pytest.raises(MidusError, match="save a full checkpoint instead"):
        model.save_pretrained(tmp_path / "delta", delta=True)


def test_a_failed_save_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    save_base(tmp_path / "base")
    save_base(tmp_path / "other", seed=9)
    model = upscale(load(tmp_path / "base"), CONFIG)
    before = model.config.to_dict()
    with pytest.raises(MidusError):
        model.save_pretrained(tmp_path / "d", delta=True, base=tmp_path / "other")
    monkeypatch.setattr(atomic, "_put_in_place", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(MidusError, match="cannot be written"):
        model.save_pretrained(tmp_path / "d", delta=True)
    monkeypatch.undo()
    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path / "full")
    assert same_state(load(tmp_path / "full"), model)
    model.save_pretrained(tmp_path / "d", delta=True)
    assert same_state(load(tmp_path / "d"), model)


def test_a_delta_never_replaces_its_base(tmp_path):
    save_base(tmp_path / "base")
    model = upscale(load(tmp_path / "base"), CONFIG)
    with pytest.raises(MidusError, match="which is being read"):
        model.save_pretrained(tmp_path / "base", delta=True)
    load(tmp_path / "base")


def test_loading_a_delta_leaves_the_given_config_alone(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    config = AutoConfig.from_pretrained(tmp_path / "delta")
    for _ in range(2):
        load(tmp_path / "delta", config=config)


def test_a_relative_base_is_recorded_whole(tmp_path, monkeypatch):
    save_base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    upscale(load("base"), CONFIG).save_pretrained("delta", delta=True)
    monkeypatch.chdir("/")
    load(tmp_path / "delta")


def test_a_delta_that_carries_a_base_tensor_is_refused(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    tensors = load_file(tmp_path / "delta" / "delta.safetensors")
    tensors["model.norm.weight"] = torch.zeros(32)
    save_file(tensors, tmp_path / "delta" / "delta.safetensors", {"format": "pt"})
    with pytest.raises(MidusError, match="belongs to the base"):
        load(tmp_path / "delta")
    with pytest.raises(MidusError, match="belongs to the base"):
        merge_delta(tmp_path / "delta", tmp_path / "out")


def test_saving_keeps_what_others_keep_in_the_folder(tmp_path):
    save_base(tmp_path / "base")
    model = upscale(load(tmp_path / "base"), CONFIG)
    out = tmp_path / "out"
    out.mkdir()
    others = ["README.md", "adapter_model.safetensors", "optimizer.pt", "checkpoint-5/state.json"]
    for name in others:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(f"mine: {name}")
    model.save_pretrained(out, max_shard_size="20KB")
    model.save_pretrained(out)
    assert [(out / name).read_text() for name in others] == [f"mine: {name}" for name in others]
    assert sorted(path.name for path in out.glob("model*")) == [
        "model.safetensors",
        "modeling_midus.py",
    ]
    (out / "README.md").unlink()
    model.save_pretrained(out)
    assert "up-scaled with midus" in (out / "README.md").read_text()


def test_generation_settings_are_not_shared_with_the_base():
    base = tiny_base()
    model = upscale(base, CONFIG)
    model.generation_config.max_length = 77
    assert base.generation_config.max_length != 77


def test_later_formats_are_refused(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    path = tmp_path / "full" / "config.json"
    path.write_text(path.read_text().replace('"midus_format": 1', '"midus_format": 2'))
    with pytest.raises(MidusError, match="upgrade midus"):
        AutoConfig.from_pretrained(tmp_path / "full")


# Other people's programs.

WITHOUT_IMPORT = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
source, again = sys.argv[1:]
config = AutoConfig.from_pretrained(source, trust_remote_code=True)
assert type(config).__name__ == "MidusLlamaConfig", type(config)
headless = AutoModel.from_pretrained(source, trust_remote_code=True)
assert type(headless).__name__ == "MidusLlamaModel", type(headless)
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
model.save_pretrained(again)
"""


@pytest.mark.parametrize("delta", [False, True])
def test_trust_remote_code_loads_without_the_import(tmp_path, delta):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "out", CONFIG, delta=delta)
    command = [sys.executable, "-c", WITHOUT_IMPORT, tmp_path / "out", tmp_path / "again"]
    subprocess.run(command, check=True)
    # What it saved has the stub, no source of ours, and the same model.
    files = sorted(path.name for path in (tmp_path / "again").glob("*.py"))
    assert files == ["modeling_midus.py"]
    assert "from midus.models import" in (tmp_path / "again" / "modeling_midus.py").read_text()
    assert same_state(
        load(tmp_path / "again"),
        load(tmp_path / "out"),
    )


def test_text_generation_pipeline(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "full", CONFIG)
    generate = pipeline("text-generation", model=str(tmp_path / "full"), device="cpu")
    out = generate("w5 w6 w7", max_new_tokens=4, do_sample=False)
    assert out[0]["generated_text"].startswith("w5 w6 w7")


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}], ids=str)
def test_device_map(tmp_path, device_map):
    base = save_base(tmp_path / "base")
    for delta in (False, True):
        out = tmp_path / f"out-{delta}"
        upscale_checkpoint(tmp_path / "base", out, CONFIG, delta=delta)
        loaded = load(out, device_map=device_map)
        ids = prompt_ids().to(loaded.device)
        assert torch.equal(loaded(ids).logits.cpu(), base(prompt_ids()).logits)


def test_dtype_can_be_chosen_when_loading_a_delta(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "delta", CONFIG, delta=True)
    loaded = load(tmp_path / "delta", dtype=torch.bfloat16, attn_implementation="eager")
    assert loaded.dtype == torch.bfloat16
    assert loaded.config._attn_implementation == "eager"
    assert (
        type(loaded).from_pretrained(tmp_path / "delta", use_cache=False).config.use_cache is False
    )


@pytest.mark.parametrize("way", ["method", "argument"])
@pytest.mark.parametrize("delta", [False, True])
def test_push_to_hub_uploads_weights_stub_and_card(tmp_path, monkeypatch, way, delta):
    from huggingface_hub import HfApi

    uploaded, cards = {}, []

    def create_repo(self, repo_id, **kwargs):
        return type("Repo", (), {"repo_id": f"me/{repo_id}"})

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, **kwargs):
        present = {path.name for path in folder_path.iterdir()}
        uploaded[repo_id] = sorted(present & set(allow_patterns))
        cards.append((folder_path / "README.md").read_text())

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    save_base(tmp_path / "base")
    model = upscale(load(tmp_path / "base"), CONFIG)
    if way == "method":
        model.push_to_hub("grown", delta=delta, tags=["mine"], commit_message="now")
    else:
        (tmp_path / "grown").mkdir()
        (tmp_path / "grown" / "secret.env").touch()  # not ours to publish
        model.save_pretrained(tmp_path / "grown", push_to_hub=True, delta=delta, tags=["mine"])
    assert '"mine"' in cards[0]
    weights = "delta.safetensors" if delta else "model.safetensors"
    assert uploaded["me/grown"] == sorted(
        [
            "README.md",
            "config.json",
            "generation_config.json",
            "midus.json",
            "modeling_midus.py",
            weights,
            *(["tokenizer.json", "tokenizer_config.json"] if delta else []),
        ]
    )


def test_a_branch_that_is_pushed_to_is_made(monkeypatch):
    from huggingface_hub import HfApi

    done = []
    repo = type("Repo", (), {"repo_id": "me/grown"})
    monkeypatch.setattr(HfApi, "create_repo", lambda self, *args, **kwargs: repo)
    monkeypatch.setattr(HfApi, "create_branch", lambda self, **kwargs: done.append(kwargs))
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **kwargs: done.append(kwargs))
    upscale(tiny_base(), CONFIG).push_to_hub("grown", revision="v2")
    made, uploaded = done
    assert made == {"repo_id": "me/grown", "branch": "v2", "exist_ok": True}
    assert uploaded["revision"] == "v2"


@pytest.mark.parametrize("delta", [False, True])
def test_a_checkpoint_grown_file_to_file_names_its_class(tmp_path, delta):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "grown", CONFIG, delta=delta)
    config = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert config["architectures"] == ["MidusLlamaForCausalLM"]

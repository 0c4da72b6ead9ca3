"""Quantized bases: the inserted blocks stay as they were trained, full checkpoint and delta."""

import pytest
import torch
from stored import save_grown
from tiny import TOLERANCE, load, prompt_ids, relative_error
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig

import midus
from midus.models.checkpoint import is_inserted
from midus.models.quantized import inserted_linears, leave_inserted

pytest.importorskip("bitsandbytes")

FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
EIGHT = {"load_in_8bit": True}
# Widths that bitsandbytes' blocks of 64 divide; twelve blocks, so that two have two digits.
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 8}
IDS = prompt_ids(2)


def load_quantized(folder, options, device="cpu", **others):
    return AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(**options),
        dtype=torch.bfloat16,
        device_map=device,
        **others,
    )


def unpacked(model):
    """The model's weights as plain tensors of the checkpoint's names."""
    from bitsandbytes.functional import dequantize_4bit

    tensors = {}
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        packed = parameter.data
        tensors[name] = dequantize_4bit(packed, state) if state is not None else packed
        if parameter.dtype == torch.int8:
            tensors[name] = packed.float() * parameter.SCB[:, None] / 127
    return tensors


@pytest.mark.parametrize("stored", ["full", "delta"])
@pytest.mark.parametrize("options", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inserted_blocks_stay_and_the_base_is_packed(tmp_path, stored, options, device):
    plain = save_grown(tmp_path, **SHAPE)
    model = load_quantized(tmp_path / stored, options, device)
    packed = {n for n, p in model.named_parameters() if p.dtype in (torch.uint8, torch.int8)}
    linears = {n for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear)}
    left = {n for n in linears if is_inserted(f"{n}.weight", plain.config)} | {"lm_head"}
    # Blocks 10 and 11 are the base's, and not taken for block 1.
    assert packed == {f"{name}.weight" for name in linears - left}
    inserted = {n: p for n, p in model.named_parameters() if is_inserted(n, model.config)}
    assert {p.dtype for p in inserted.values()} == {torch.bfloat16}
    tensors = {name: tensor.float().cpu() for name, tensor in unpacked(model).items()}
    plain.load_state_dict(tensors, strict=True)
    with torch.no_grad():
        logits, expected = model(IDS.to(device)).logits.float().cpu(), plain(IDS).logits
    # bfloat16 picks another slot now and then.
    assert torch.cosine_similarity(logits.flatten(), expected.flatten(), dim=0) > 0.98
    tokens = model.generate(IDS.to(device), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 15)


def test_a_packed_checkpoint_loads_as_it_was_saved(tmp_path):
    save_grown(tmp_path, **SHAPE)
    model = load_quantized(tmp_path / "delta", FOUR)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", device_map="cpu")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert type(again.model.layers[1].self_attn.q_proj) is torch.nn.Linear
    with pytest.raises(midus.MidusError, match="so a delta would lose it"):
        model.save_pretrained(tmp_path / "again", delta=True)


def test_adapters_train_on_a_packed_base_and_serve_the_plain_one(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    save_grown(tmp_path, **SHAPE)
    model = load_quantized(tmp_path / "full", FOUR)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # a product that has no gradient
            module.support_avx512bf16_for_cpu = False
    model = get_peft_model(model, LoraConfig(r=2, **midus.lora_targets(model)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    model.save_pretrained(tmp_path / "adapter")
    served = PeftModel.from_pretrained(load(tmp_path / "full"), tmp_path / "adapter")
    with torch.no_grad():
        logits = served(IDS).logits
        merged = served.merge_and_unload()(IDS).logits
    assert relative_error(merged, logits) < TOLERANCE[torch.float32]


def test_a_given_list_is_kept_and_the_given_config_is_not_changed(tmp_path):
    save_grown(tmp_path, **SHAPE)
    given = BitsAndBytesConfig(**FOUR, llm_int8_skip_modules=["down_proj"])
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "full", quantization_config=given, device_map="cpu"
    )
    assert given.llm_int8_skip_modules == ["down_proj"]
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert type(model.model.layers[1].self_attn.q_proj) is torch.nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is not torch.nn.Linear


def test_a_decoder_without_its_head_is_packed_alike(tmp_path):
    save_grown(tmp_path, **SHAPE)
    decoder = AutoModel.from_pretrained(
        tmp_path / "full", quantization_config=BitsAndBytesConfig(**FOUR), device_map="cpu"
    )
    kinds = [type(block.self_attn.q_proj) is torch.nn.Linear for block in decoder.layers]
    assert [i for i, plain in enumerate(kinds) if plain] == decoder.config.memory_positions


def test_names_are_read_as_beginnings_and_end_in_a_part():
    names = inserted_linears([1, 12])
    assert names == [
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
        "model.layers.12.self_attn",
        "model.layers.12.mlp",
    ]
    assert leave_inserted({"other": 1}, [1]) == {"other": 1}


def test_torchao_packs_the_base_alone(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    plain = save_grown(tmp_path, **SHAPE)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "delta",
        quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2)),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    kinds = [
        type(block.self_attn.q_proj.weight) is torch.nn.Parameter for block in model.model.layers
    ]
    assert [i for i, own in enumerate(kinds) if own] == model.config.memory_positions
    with torch.no_grad():
        logits, expected = model(IDS).logits.float(), plain(IDS).logits
    assert torch.cosine_similarity(logits.flatten(), expected.flatten(), dim=0) > 0.9

"""The embedded SmolLM2-135M, a real model on real text: what a user runs first."""

import json
import lzma
import re
import shlex
from pathlib import Path

import pytest
import torch
from tiny import TOLERANCE, fill_tables, relative_error

from midus import UpscaleConfig, upscale
from midus.evaluation.verify import sample_text, verify
from midus.models.loading import load_model, load_tokenizer
from midus.upscaling import upscale_checkpoint

pytestmark = pytest.mark.slow
README = Path(__file__).parents[1] / "README.md"
# What a test adds to the README's commands, so that they read and write less.
LESS = {
    "midus train": ["--dry-run"],
    "midus study": ["--dry-run"],
    "midus eval smollm2-135m": ["--tasks", "piqa"],
    "midus eval perplexity": ["--max-tokens", "512", "--window", "256"],
    "midus verify": ["--max-tokens", "128"],
    "midus generate": ["--max-new-tokens", "12"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_growing_changes_no_logit(tmp_path, dtype):
    done = upscale_checkpoint("smollm2-135m", tmp_path / "delta", delta=True)
    assert done.identity_blocks == 15
    result = verify("smollm2-135m", tmp_path / "delta", max_tokens=512, dtype=dtype)
    assert result.max_abs_logit_diff == 0.0
    assert result.num_tokens == 512
    # A 135M model reads Melville with a perplexity of some tens; garbage would be thousands.
    assert 10 < result.base_perplexity < 200


def test_llama_pro_changes_no_logit_and_is_a_plain_llama(tmp_path):
    base = load_model("smollm2-135m")
    grown = upscale(base, UpscaleConfig(method="llama_pro"))
    assert type(grown) is type(base)
    assert len(grown.model.layers) == 45
    ids = load_tokenizer("smollm2-135m")(sample_text()[:800], return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(grown(ids).logits, base(ids).logits)


def test_growing_in_memory_generates_the_same_text():
    tokenizer = load_tokenizer("smollm2-135m")
    base = load_model("smollm2-135m")
    grown = upscale(base)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    texts = [
        tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0])
        for model in (base, grown)
    ]
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
    assert texts[0].rstrip().endswith("<|im_end|>")  # it knows where its turn ends


def test_cached_generation_with_filled_tables():
    """Left-padded real prompts on a model whose memory is not silent."""
    tokenizer = load_tokenizer("smollm2-135m")
    model = fill_tables(upscale(load_model("smollm2-135m"), UpscaleConfig()), scale=0.02)
    tokenizer.padding_side = "left"
    inputs = tokenizer([sample_text()[:200], "Once upon a time"], return_tensors="pt", padding=True)
    outputs = [
        model.generate(
            **inputs,
            max_new_tokens=12,
            do_sample=False,
            use_cache=use_cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    logits = [torch.stack(output.logits) for output in outputs]
    assert relative_error(logits[0], logits[1]) < TOLERANCE[torch.float32]


def test_the_readmes_commands_run(midus, tmp_path, monkeypatch):
    """Every `midus` line of the README, in order, in a folder with what they read.

    Training is told and not done; `make demo` and the tests of training do it. A suite is run on
    two documents of one of its tasks, and texts are short. vLLM is not installed here.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "studies"):
        (tmp_path / folder).symlink_to(README.parent / folder)
    (tmp_path / "corpus").mkdir()
    documents = (README.parent / "examples" / "data" / "paradise_lost.jsonl").read_text()
    (tmp_path / "corpus" / "some.jsonl").write_text("".join(documents.splitlines(True)[:20]))
    (tmp_path / "eval" / "piqa").mkdir(parents=True)
    rows = [{"goal": "Boil an egg.", "sol1": "Use hot water.", "sol2": "Use ice.", "label": 0}] * 2
    with lzma.open(tmp_path / "eval" / "piqa" / "validation.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), flags=re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith("midus ")]
    assert len(commands) >= 5
    for command in commands:
        less = next((LESS[start] for start in LESS if command.startswith(start)), [])
        result = midus(*shlex.split(command, comments=True)[1:], *less)
        if command.startswith("midus serve"):  # `make test-vllm` serves
            assert result.code == 2
            assert "pip install vllm" in result.err
            continue
        assert result.code == 0, f"{command}\n{result.out}{result.err}"
        if "--json" in command:
            json.loads(result.out)
